# SPDX-License-Identifier: Apache-2.0
"""The settings of ``muster inject``: from a flag, else the template, else a variable.

A setting stays on the template, as an annotation: another call without flags does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from agent.config import Config
from injection import parsers
from injection.parsers import SECRET_KEYS, TEXT_LENGTH, store_faults
from rdzv import settings as texts
from rdzv.errors import ConfigError
from rdzv.records.policy import JobPolicy
from rdzv.settings import Setting, built, field, part, settings_of

DOMAIN = "muster.dev/"
LABEL = DOMAIN + "job"
"""The label of the pods of a job."""
ASKS = DOMAIN + "inject"
"""The label by which a pod asks the controller for its sidecar, or a namespace for all its pods."""

_DEFAULT_KEYS = "ca.crt,tls.crt,tls.key"

_SIDECARS = settings_of(Config)
OWN = ("first_call_s", "last_call_s", "on_cut", "stuck_after_s", "when_stuck", "warm")
"""The settings that one sidecar goes by, as its user gives them here; the others are the job's, or
made from the object.

``first_call_s``: longer, fewer worlds while pods come; shorter, the first trains sooner.
``last_call_s``: longer, one that was there before is more often in a world; shorter, the others
train sooner. ``on_cut``: ``hold`` trains no step that another world may train as well, and none for
so long. ``stuck_after_s``: shorter, a rank that hangs is named sooner, and so is one that is slow.
"""


def _of_sidecar(name: str, why: str, otherwise: str | None = None) -> Any:
    """Make the field of a setting that the sidecar has, too; its own default need not be given."""
    own = _SIDECARS[name]
    otherwise = otherwise or own.default_text({})
    return field(replace(own, default=None, why=why, otherwise=otherwise))


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
    policy: Mapping[str, Any] = part(JobPolicy, "inject")
    on_cut: str | None = _of_sidecar(
        "on_cut",
        "What ranks do once their pod has had no lease for 60 s: train on, or wait for one.",
    )
    stuck_after_s: float | None = _of_sidecar(
        "stuck_after_s", "Time without a step after which ranks are asked for their stacks."
    )
    when_stuck: str | None = _of_sidecar(
        "when_stuck",
        "What happens to a rank that keeps its world from training: it is named, or also ended,"
        " so that the world forms again from the last save.",
    )
    warm: str | None = _of_sidecar(
        "warm", "1: workers start without importing torch in each new world."
    )
    below_min: Literal["hold", "commit"] | None = _of_sidecar(
        "below_min",
        "What a drain does that would leave fewer than min: wait for a replacement until the"
        " deadline, or let the pod go once all have saved.",
        "commit where a replacement comes only once the pod is gone, else hold",
    )
    first_call_s: float | None = _of_sidecar(
        "first_call_s",
        "How long a world of at least min waits for a pod whose torchrun has never connected.",
    )
    last_call_s: float | None = _of_sidecar(
        "last_call_s",
        "How long a world of at least min waits for a torchrun that was there before.",
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
            parsers.secret_keys,
            _DEFAULT_KEYS,
            "KEY,…",
            f"Which of {', '.join(SECRET_KEYS)} that Secret has.",
        )
    )
    image: str | None = field(
        Setting(
            "--image",
            parsers.image,
            None,
            "IMAGE",
            "Image of the sidecar, from Dockerfile.sidecar.",
        )
    )
    pull_policy: str | None = field(
        Setting(
            "--pull-policy",
            texts.one_of("Always", "IfNotPresent", "Never"),
            None,
            "POLICY",
            "When the kubelet pulls the sidecar's image: Always, IfNotPresent or Never.",
            otherwise="Kubernetes' own",
        )
    )
    pull_secrets: tuple[str, ...] | None = field(
        Setting(
            "--pull-secrets",
            parsers.names,
            None,
            "NAME,…",
            "Secrets of the pod's namespace to pull the sidecar's image with.",
            otherwise="none besides the pod's",
        )
    )
    resources: Mapping[str, tuple[str, str | None]] | None = field(
        Setting(
            "--resources",
            parsers.resources,
            None,
            "NAME=REQUEST[:LIMIT],…",
            "What the sidecar asks for of cpu, memory and ephemeral-storage, as in"
            " cpu=125m:500m,memory=128Mi; a Guaranteed pod's sidecar requests its limits, and a"
            " BestEffort pod's sidecar asks for nothing.",
            otherwise="cpu=50m,memory=128Mi, by the pod's class",
        )
    )
    user: int | Literal["none"] | None = field(
        Setting(
            "--user",
            parsers.user,
            "65532",
            "UID|none",
            "User and group of the sidecar; none: the cluster chooses, as OpenShift does.",
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
            parsers.yes_or_no,
            None,
            "true|false",
            "Put muster-run before the container's command; --no-wrap leaves the command alone, and"
            " holds the end back by a preStop hook.",
            otherwise="wrap where there is a command",
        )
    )
    pod_failure_policy: bool | None = field(
        Setting(
            "--pod-failure-policy",
            parsers.yes_or_no,
            None,
            "true|false",
            "Add a podFailurePolicy to a Job that has none: pods that are evicted or drained are no"
            " failures of the job. The webhook, which changes pods alone, does not.",
            otherwise="none is added",
        )
    )
    slots: int | None = _of_sidecar(
        "slots", "Worker processes in a pod.", "as the spec says, else 1"
    )
    role: str | None = field(
        Setting(
            "--horovod",
            texts.one_of("launcher", "worker"),
            None,
            "launcher|worker",
            "What the pod is to a horovodrun: the one that it runs in, or one of its workers'.",
            otherwise="as an MPIJob or a TrainingJob says",
        )
    )
    topology: tuple[str, ...] | None = field(
        Setting(
            "--topology",
            parsers.topology,
            None,
            "PATH",
            "Where the pods' machines stand, the most general part first; a part in braces is read"
            " from each pod, as {metadata.labels['topology.kubernetes.io/zone']}.",
            otherwise="unknown",
        )
    )
    http_port: int | None = _of_sidecar(
        "http_port",
        "Port of the sidecar's health, readiness and metrics.",
        "9400; with hostNetwork one made from the job's name",
    )
    relay_port: int | None = _of_sidecar(
        "relay_port",
        "Loopback port of torchrun's rendezvous.",
        "29400; with hostNetwork one made from the job's name",
    )

    @staticmethod
    def faults(values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults between settings, one sentence each."""
        yield from JobPolicy.faults(values)
        match values:
            case {"etcd_endpoints": (*endpoints,), "etcd_secret": secret}:
                yield from store_faults(endpoints, secret, values.get("etcd_secret_keys") or ())


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
    return Told(built(TemplateSettings, values), kept)
