# SPDX-License-Identifier: Apache-2.0
"""A job to submit, read from the options of ``muster submit``; it reports all faults at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from console.submit.pod_template import PodTemplate, read_template
from injection.facts import quantity
from injection.launches import found_launches
from injection.parsers import IMAGE
from launcher_shim.pod.launchers import CENTRAL
from launcher_shim.torchrun.launcher import VARIABLES
from rdzv import settings as texts
from rdzv.errors import ConfigError

Read = TypeVar("Read")

GRACE_S = 120
"""The grace of a pod, unless it is given: enough to save some gigabytes to shared storage."""
RETRIES = 3
GPU = "nvidia.com/gpu"

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_INDEX_LENGTH = 6
"""The longest suffix that a pod of a Job adds to its host name: a dash, and an index."""
NAME_LENGTH = 63 - _INDEX_LENGTH
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)
_QUALIFIED = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_PER_NODE = VARIABLES["nproc-per-node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """The options and the command, as the user gave them."""

    name: str | None = None
    nodes: str | None = None
    start: str | None = None
    min_workers: str | None = None
    max_workers: str | None = None
    sizes: str | None = None
    gpus: str | None = None
    cpu: str | None = None
    memory: str | None = None
    image: str | None = None
    source: str | None = None
    container: str | None = None
    volumes: Sequence[str] = ()
    env: Sequence[str] = ()
    priority_class: str | None = None
    tolerations: Sequence[str] = ()
    selector: Sequence[str] = ()
    service_account: str | None = None
    pull_secrets: Sequence[str] = ()
    working_dir: str | None = None
    labels: Sequence[str] = ()
    grace: str | None = None
    retries: str | None = None
    command: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A valid job.

    ``least`` and ``most``: the fewest and the most pods that train; ``start``: the pods at the
    start. ``template``: the pod template to complete, ``container`` the index of its container
    that trains. ``command``: of that container; empty if the template has one.
    """

    name: str
    least: int
    most: int
    start: int
    template: PodTemplate
    command: Sequence[str]
    sizes: str | None = None
    gpus: tuple[str, int] | None = None
    cpu: str | None = None
    memory: str | None = None
    image: str | None = None
    volumes: Sequence[Mapping[str, Any]] = ()
    mounts: Sequence[Mapping[str, Any]] = ()
    env: Sequence[Mapping[str, str]] = ()
    priority_class: str | None = None
    tolerations: Sequence[Mapping[str, str]] = ()
    selector: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    pull_secrets: Sequence[str] = ()
    working_dir: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    grace_s: int | None = None
    retries: int = RETRIES

    @property
    def central(self) -> bool:
        """Whether its command starts the central launcher."""
        held = self.template.container
        command = list(self.command) or [*held.get("command", []), *held.get("args", [])]
        return any(one.launcher == CENTRAL.name for one in found_launches({"command": command}))


class _Reader:
    """Parses texts of options and collects the faults, one sentence each."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def one(self, flag: str, parse: Callable[[str], Read], text: str | None) -> Read | None:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            self.faults.append(f"{flag}: {text!r} is wrong: {error}")
            return None

    def each(self, flag: str, parse: Callable[[str], Read], given: Sequence[str]) -> list[Read]:
        return [one for text in given if (one := self.one(flag, parse, text)) is not None]


def read_submission(
    options: SubmitOptions, environ: Mapping[str, str], read_file: Callable[[str], str]
) -> Submission:
    """Parse and check all of ``options``; raises ``ConfigError`` with a line for each fault.

    ``environ``: where ``--env NAME`` takes its value from. ``read_file`` returns the text of
    ``--from``.
    """
    reader = _Reader()
    name = reader.one("the name", job_name, options.name)
    if options.name is None:
        reader.faults.append("the job has no name: muster submit NAME …")
    sizes = _sizes(options, reader)
    template = _template(options, reader, read_file)
    command = _command(options, reader)
    pod = _pod(options, reader)
    gpus = reader.one("--gpus", gpu_count, options.gpus)
    env = reader.each("--env", lambda text: variable(text, environ), options.env)
    if reader.faults or name is None or sizes is None:
        raise ConfigError("\n".join(reader.faults))
    least, most, start = sizes
    job = Submission(
        name=name,
        least=least,
        most=most,
        start=start,
        template=template,
        command=command,
        gpus=gpus,
        env=env,
        **pod,
    )
    return replace(job, env=[*env, *_further_variables(job)])


def _pod(options: SubmitOptions, reader: _Reader) -> dict[str, Any]:
    """Parse the options that change the pod alone."""
    one, each = reader.one, reader.each
    mounted = each("--volume", volume, options.volumes)
    mounts = [mount for _, mount in mounted]
    given = [mount["mountPath"] for mount in mounts]
    reader.faults += [
        f"--volume: {path} is given twice: give one volume for each path"
        for path in dict.fromkeys(given)
        if given.count(path) > 1
    ]
    retries = one("--retries", texts.count(0, 1000), options.retries)
    return {
        "sizes": options.sizes,
        "cpu": one("--cpu", amount, options.cpu),
        "memory": one("--memory", amount, options.memory),
        "image": one("--image", image, options.image),
        "volumes": list({held["name"]: held for held, _ in mounted}.values()),
        "mounts": mounts,
        "priority_class": one("--priority-class", texts.name, options.priority_class),
        "tolerations": each("--toleration", toleration, options.tolerations),
        "selector": dict(each("--selector", pair, options.selector)),
        "service_account": one("--service-account", texts.name, options.service_account),
        "pull_secrets": each("--image-pull-secret", texts.name, options.pull_secrets),
        "working_dir": one("--working-dir", absolute, options.working_dir),
        "labels": dict(each("--label", pair, options.labels)),
        "grace_s": one("--grace", texts.whole_duration_s(1, 86_400), options.grace),
        "retries": RETRIES if retries is None else retries,
    }


def _template(
    options: SubmitOptions, reader: _Reader, read_file: Callable[[str], str]
) -> PodTemplate:
    """Return the template of ``--from``, or the empty one that ``--image`` completes."""
    if options.source is None:
        if not options.image:
            reader.faults.append("no image is named: give --image IMAGE, or --from FILE with a pod")
        if options.container:
            reader.faults.append("--container is for --from: give both, or neither")
        return PodTemplate()
    has_command = bool(options.command)
    try:
        text = read_file(options.source)
        return read_template(text, options.source, options.container, has_command=has_command)
    except ConfigError as error:
        reader.faults.append(str(error))
        return PodTemplate()


def _further_variables(job: Submission) -> list[Mapping[str, str]]:
    """Return Arena's variables that the command uses, and torchrun's number of processes."""
    gpus = job.gpus[1] if job.gpus else 1
    shown = {"workers": job.start, "minWorkers": job.least, "maxWorkers": job.most, "gpus": gpus}
    if job.gpus and not job.central:
        shown[_PER_NODE] = gpus
    given = {one["name"] for one in job.env}
    return [
        {"name": name, "value": str(number)}
        for name, number in shown.items()
        if name not in given
        and not job.template.has_variable(name)
        and (name == _PER_NODE or _mentions(job.command, name))
    ]


def _sizes(options: SubmitOptions, reader: _Reader) -> tuple[int, int, int] | None:
    """Return the fewest and the most pods, and those at the start; None with a fault."""
    number = texts.count(1, 100_000)
    known = len(reader.faults)
    start = reader.one("--start", number, options.start)
    least = reader.one("--min-workers", number, options.min_workers)
    most = reader.one("--max-workers", number, options.max_workers)
    if options.nodes is not None:
        if options.min_workers or options.max_workers:
            reader.faults.append(
                "--nodes and --min-workers or --max-workers say the same: give one"
            )
        least, most = reader.one("--nodes", nodes, options.nodes) or (None, None)
    elif not (options.start or options.max_workers):
        reader.faults.append(
            "the number of pods is missing: give --nodes MIN:MAX, such as --nodes 2:4"
        )
    reader.one("--sizes", texts.sizes, options.sizes)
    if len(reader.faults) > known:
        return None
    least, most = least or 1, most or start or 1
    start = start or most
    if least > most:
        reader.faults.append(f"min ({least}) can't exceed max ({most}): --nodes {most}:{least}")
    elif not least <= start <= most:
        reader.faults.append(
            f"--start is {start}: choose a number from min ({least}) to max ({most})"
        )
    else:
        return least, most, start
    return None


def _command(options: SubmitOptions, reader: _Reader) -> list[str]:
    """Return the command of the container; a single word with blanks is a line of shell."""
    command = list(options.command)
    if not command and options.source is None:
        reader.faults.append("the command is missing: muster submit … -- torchrun train.py")
    if len(command) == 1 and len(command[0].split()) > 1:
        return ["sh", "-c", command[0]]
    return command


def _mentions(command: Sequence[str], word: str) -> bool:
    pattern = re.compile(rf"\$(\{{{word}\}}|\({word}\)|{word}\b)")
    return any(pattern.search(text) for text in command)


def job_name(text: str) -> str:
    """Parse the name of a job, which is also a label and the beginning of its pods' names."""
    if len(text) > NAME_LENGTH:
        raise ValueError(f"it has {len(text)} characters, and a job's name has {NAME_LENGTH}")
    if not _LABEL.fullmatch(text):
        fits = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
        hint = f": {fits}" if _LABEL.fullmatch(fits) else ""
        raise ValueError(f"use lower-case letters, digits and '-', beginning with a letter{hint}")
    return text


def image(text: str) -> str:
    """Parse the name of an image."""
    if not IMAGE.fullmatch(text):
        raise ValueError("expected an image such as example.org/digits:1.0")
    return text


def nodes(text: str) -> tuple[int, int]:
    """Parse ``MIN:MAX``, or one number for both."""
    number = texts.count(1, 100_000)
    least, colon, most = text.partition(":")
    try:
        found = number(least), number(most if colon else least)
    except ValueError as error:
        raise ValueError(f"{error} of pods, or two, as in 2:4") from error
    if found[0] > found[1]:
        raise ValueError(f"min ({found[0]}) can't exceed max ({found[1]}): {most}:{least}")
    return found


def gpu_count(text: str) -> tuple[str, int]:
    """Parse ``N`` or ``RESOURCE=N``: the GPUs of one pod."""
    resource, equals, count = text.rpartition("=")
    if equals and not ("/" in resource and _QUALIFIED.fullmatch(resource)):
        raise ValueError("expected a number, or a resource and a number, as in amd.com/gpu=8")
    number = texts.count(0, 1024)(count)
    if number == 0:
        raise ValueError("leave --gpus out for a job without GPUs")
    return resource or GPU, number


def amount(text: str) -> str:
    """Parse a quantity of Kubernetes, such as 500m or 16Gi."""
    found = quantity(text)
    if found is None or found <= 0:
        raise ValueError("expected an amount such as 4, 500m or 16Gi")
    return text


def absolute(text: str) -> str:
    """Parse an absolute path in the container."""
    if not text.startswith("/") or not text.isprintable() or ":" in text:
        raise ValueError("expected an absolute path, as in /data")
    return text


def volume(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse ``CLAIM:/PATH[:ro]``, or ``/HOST/PATH:/PATH[:ro]`` for a folder of the node.

    Return the volume and its mount.
    """
    source, _, rest = text.partition(":")
    path, colon, mode = rest.partition(":")
    if not source or not path.startswith("/") or (colon and mode not in ("ro", "rw")):
        raise ValueError("expected CLAIM:/PATH, as in checkpoints:/checkpoints; :ro for read-only")
    absolute(path)
    if source.startswith("/"):
        name = "host-" + (re.sub(r"[^a-z0-9]+", "-", source.lower()).strip("-") or "root")
        held: dict[str, Any] = {"hostPath": {"path": source, "type": "Directory"}}
    elif re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", source, re.ASCII):
        name, held = source.replace(".", "-"), {"persistentVolumeClaim": {"claimName": source}}
    else:
        raise ValueError(f"{source} is no name of a PersistentVolumeClaim, and no path of the node")
    mount: dict[str, Any] = {"name": name[:63].rstrip("-"), "mountPath": path}
    if mode == "ro":
        mount["readOnly"] = True
    return {"name": mount["name"], **held}, mount


def variable(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Parse ``NAME=VALUE``, or ``NAME`` for the value of this shell."""
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise ValueError("expected NAME=VALUE")
    if not equals and name not in environ:
        raise ValueError(f"expected NAME=VALUE, as {name} is not set here")
    return {"name": name, "value": value if equals else environ[name]}


def pair(text: str) -> tuple[str, str]:
    """Parse ``KEY=VALUE`` of a label or a selector."""
    key, equals, value = text.partition("=")
    if not equals or not _QUALIFIED.fullmatch(key):
        raise ValueError("expected KEY=VALUE")
    if len(value) > 63 or not re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?", value):
        raise ValueError("a value has letters, digits, '.', '_' and '-', and 63 characters at most")
    return key, value


def toleration(text: str) -> dict[str, str]:
    """Parse ``KEY[=VALUE][:EFFECT]``, as of ``kubectl taint``; ``all`` tolerates every taint."""
    if text == "all":
        return {"operator": "Exists"}
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if not _QUALIFIED.fullmatch(key) or (colon and effect not in _EFFECTS):
        raise ValueError(f"expected KEY[=VALUE][:EFFECT], with an effect of {', '.join(_EFFECTS)}")
    found = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        found["value"] = value
    if effect:
        found["effect"] = effect
    return found
