# SPDX-License-Identifier: Apache-2.0
"""The settings of ``muster inject``: from a flag, else the template, else a variable.

A setting stays on the template, as an annotation: another call without flags does the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent.config import parsers as texts
from agent.config.size_faults import size_faults
from agent.config.table import Setting, field, settings_of
from rdzv.errors import ConfigError
from rdzv.flags import named

DOMAIN = "muster.dev/"
LABEL = DOMAIN + "job"
"""The label of the pods of a job."""
ASKS = DOMAIN + "inject"
"""The label by which a pod asks the controller for its sidecar, or a namespace for all its pods."""

SECRET_KEYS = ("ca.crt", "tls.crt", "tls.key", "username", "password")
_DEFAULT_KEYS = "ca.crt,tls.crt,tls.key"

_FIELD_PART = re.compile(r"\{metadata\.(labels|annotations)\['[A-Za-z0-9._/-]+'\]\}", re.ASCII)
"""A part of a topology that each pod reads from itself, in the syntax of the downward API."""

TEXT_LENGTH = 4096
"""Maximum length of a setting's text: room for the endpoints of a large store. An annotation may
have 256 KiB, and whoever may create a pod may write one."""

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", re.ASCII)


def _image(text: str) -> str:
    if not _IMAGE.fullmatch(text):
        raise ValueError("expected an image such as example.org/muster-sidecar:0.1.0")
    return text


def _yes_or_no(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("expected true or false")
    return text == "true"


def _horovod(text: str) -> str:
    if text not in ("launcher", "worker"):
        raise ValueError("expected launcher or worker")
    return text


def _secret_keys(text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(","))
    if not set(keys) <= set(SECRET_KEYS):
        raise ValueError(f"expected some of {','.join(SECRET_KEYS)}")
    for one, other in (("tls.crt", "tls.key"), ("username", "password")):
        if (one in keys) != (other in keys):
            raise ValueError(f"{one} and {other} go together")
    return keys


def _topology(text: str) -> tuple[str, ...]:
    parts: list[str] = []
    for piece in text.split("/") if text else ():
        # A slash between braces belongs to a label's key.
        if parts and "{" in parts[-1] and "}" not in parts[-1]:
            parts[-1] += f"/{piece}"
        else:
            parts.append(piece)
    for part in parts:
        if not part.startswith("{"):
            texts.topology(part)
        elif not _FIELD_PART.fullmatch(part):
            raise ValueError(
                "a part in braces is {metadata.labels['KEY']} or {metadata.annotations['KEY']}"
            )
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSettings:
    """The settings of one pod template; None for one that is not given."""

    job: str | None = field(
        Setting("--job", texts.name, None, "NAME", "Name of the job.", otherwise="the object's")
    )
    namespace: str | None = field(
        Setting(
            "--namespace",
            texts.name,
            None,
            "NAME",
            "Namespace of the job in the store.",
            otherwise="the pod's",
        )
    )
    min_nodes: int | None = field(
        Setting(
            "--min",
            texts.count(1, 100_000),
            None,
            "N",
            "Fewest pods the job can train with.",
            otherwise="as an elastic object says",
        )
    )
    max_nodes: int | None = field(
        Setting(
            "--max",
            texts.count(1, 100_000),
            None,
            "N",
            "Most pods the job takes.",
            otherwise="as an elastic object says",
        )
    )
    sizes: tuple[int, ...] | None = field(
        Setting(
            "--sizes",
            texts.sizes,
            None,
            "N,…",
            "Numbers of pods that may train together.",
            otherwise="any from min to max",
        )
    )
    unit: int | None = field(
        Setting(
            "--unit",
            texts.count(1, 100_000),
            None,
            "N",
            "Train with a multiple of so many pods.",
            otherwise="1",
        )
    )
    gather_s: float | None = field(
        Setting(
            "--gather",
            texts.duration_s(0, 86_400),
            None,
            "TIME",
            "How long the first newcomer waits for others to be let in with it, at least the last"
            " measured start.",
            otherwise="60s",
        )
    )
    on_cut: str | None = field(
        Setting(
            "--on-cut",
            texts.one_of("train", "hold"),
            None,
            "train|hold",
            "What ranks do once their pod has had no lease for 60 s: train on, or wait for one.",
            otherwise="train",
        )
    )
    below_min: Literal["hold", "commit"] | None = field(
        Setting(
            "--below-min",
            texts.one_of("hold", "commit"),
            None,
            "hold|commit",
            "What a drain does that would leave fewer than min: wait for a replacement until the"
            " deadline, or let the pod go once all have saved.",
            otherwise="commit where a replacement comes only once the pod is gone, else hold",
        )
    )
    first_call_s: float | None = field(
        Setting(
            "--first-call",
            texts.duration_s(0, 3600),
            None,
            "TIME",
            "How long a world of at least min waits for a pod whose torchrun has never connected.",
            otherwise="30s",
        )
    )
    last_call_s: float | None = field(
        Setting(
            "--last-call",
            texts.duration_s(0, 600),
            None,
            "TIME",
            "How long a world of at least min waits for a torchrun that was there before.",
            otherwise="2s",
        )
    )
    etcd_endpoints: tuple[str, ...] | None = field(
        Setting(
            "--etcd-endpoints",
            texts.endpoints,
            None,
            "HOST:PORT,…",
            "Members of the etcd cluster, with https:// for TLS.",
            texts.without_user,
        )
    )
    etcd_secret: str | None = field(
        Setting(
            "--etcd-secret",
            texts.name,
            None,
            "NAME",
            "Secret with what etcd asks for; mounted into the sidecar alone.",
            otherwise="",
        )
    )
    etcd_secret_keys: tuple[str, ...] | None = field(
        Setting(
            "--etcd-secret-keys",
            _secret_keys,
            _DEFAULT_KEYS,
            "KEY,…",
            f"Which of {', '.join(SECRET_KEYS)} that Secret has.",
        )
    )
    image: str | None = field(
        Setting(
            "--image",
            _image,
            None,
            "IMAGE",
            "Image of the sidecar, from Dockerfile.sidecar.",
        )
    )
    container: str | None = field(
        Setting(
            "--container",
            texts.name,
            None,
            "NAME",
            "The container that trains.",
            otherwise="the only one",
        )
    )
    wrap: bool | None = field(
        Setting(
            "--wrap",
            _yes_or_no,
            None,
            "true|false",
            "Put muster-run before the container's command; --no-wrap leaves the command alone, and"
            " holds the end back by a preStop hook.",
            otherwise="wrap where there is a command",
        )
    )
    slots: int | None = field(
        Setting(
            "--slots",
            texts.count(1, 1024),
            None,
            "N",
            "Worker processes in a pod.",
            otherwise="as the spec says, else 1",
        )
    )
    horovod: str | None = field(
        Setting(
            "--horovod",
            _horovod,
            None,
            "launcher|worker",
            "What the pod is to a horovodrun: the one that it runs in, or one of its workers'.",
            otherwise="as an MPIJob or a TrainingJob says",
        )
    )
    topology: tuple[str, ...] | None = field(
        Setting(
            "--topology",
            _topology,
            None,
            "PATH",
            "Where the pods' machines stand, the most general part first; a part in braces is read"
            " from each pod, as {metadata.labels['topology.kubernetes.io/zone']}.",
            otherwise="unknown",
        )
    )
    http_port: int | None = field(
        Setting(
            "--http-port",
            texts.real_port,
            None,
            "PORT",
            "Port of the sidecar's health, readiness and metrics.",
            otherwise="9400; with hostNetwork one made from the job's name",
        )
    )
    relay_port: int | None = field(
        Setting(
            "--relay-port",
            texts.real_port,
            None,
            "PORT",
            "Loopback port of torchrun's rendezvous.",
            otherwise="29400; with hostNetwork one made from the job's name",
        )
    )

    @staticmethod
    def faults(values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults between settings, one sentence each."""
        yield from size_faults(values)
        match values:
            case {"etcd_endpoints": (*endpoints,), "etcd_secret": secret}:
                yield from _store_faults(endpoints, secret, values.get("etcd_secret_keys") or ())


def _store_faults(
    endpoints: Sequence[str], secret: str | None, keys: Sequence[str]
) -> Iterator[str]:
    given = named("--etcd-endpoints")
    encrypted = {endpoint.startswith("https://") for endpoint in endpoints}
    if len(encrypted) > 1:
        yield f"{given}: some are https:// and some are not: write all alike"
    elif encrypted == {True} and (secret is None or "ca.crt" not in keys):
        yield (
            f"{given} are https://: name a Secret with --etcd-secret, and ca.crt among its"
            " --etcd-secret-keys"
        )
    elif encrypted == {False} and secret is not None and {"ca.crt", "tls.crt"} & {*keys}:
        yield (
            f"{given} are not https://, so the certificates of --etcd-secret would serve nothing:"
            " write https://host:port, or --etcd-secret-keys username,password"
        )


TABLE = settings_of(TemplateSettings)


def annotation(name: str) -> str:
    """Return the name of the annotation that carries a setting."""
    return DOMAIN + TABLE[name].flag.removeprefix("--")


@dataclass(frozen=True, slots=True)
class Told:
    """The settings that were given, and the annotations that keep them."""

    settings: TemplateSettings
    annotations: Mapping[str, str]


def told(
    flags: Mapping[str, str | None],
    annotations: Mapping[str, str],
    environ: Mapping[str, str],
) -> Told:
    """Read the settings of one template.

    ``annotations`` are those of the template; ``flags`` maps attribute names to texts, or None.
    Raises ``ConfigError`` with one line for each fault.
    """
    values: dict[str, object] = {}
    kept: dict[str, str] = {}
    faults: list[str] = []
    for name, setting in TABLE.items():
        sources = (
            (flags.get(name), setting.flag),
            (annotations.get(annotation(name)), f"the annotation {annotation(name)}"),
            (environ.get(setting.variable) or None, setting.variable),
        )
        default = (setting.default_text(environ), "the default")
        text, source = next((pair for pair in sources if pair[0] is not None), default)
        if text is None:
            values[name] = None
            continue
        if len(text) > TEXT_LENGTH:
            faults.append(
                f"{setting.flag} ({setting.variable}): {len(text)} characters from {source}: give"
                f" {TEXT_LENGTH} at most"
            )
            continue
        if source != default[1]:
            kept[annotation(name)] = text
        try:
            values[name] = setting.parse(text)
        except ValueError as error:
            faults.append(
                f"{setting.flag} ({setting.variable}): {setting.quote(text)} from {source}: {error}"
            )
    if faults:
        # ``demand`` reports faults between settings once they are complete; here only with others.
        raise ConfigError("\n".join([*faults, *TemplateSettings.faults(values)]))
    return Told(TemplateSettings(**values), kept)  # type: ignore[arg-type]
