# SPDX-License-Identifier: Apache-2.0
"""The object that created a pod, by its kind: what the pod shows of it, its manifest, its replicas.

Pure, and all that the controller does by ``injection/kinds.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from injection.annotations import ANNOTATION
from injection.counts import TemplateCount, below
from injection.failure_policy import GRACE
from injection.kinds import FRAMEWORKS, KINDS, OF_VERSIONS, PLAIN_PATH, PodSigns, kind_of
from injection.settings import ASKS
from injection.workloads import Role
from rdzv.records.job import HistoryEntry, Job

SERVERS_GRACE_S = 30
"""The grace that the API server sets by default; it looks the same as one that a user set."""

AUTOSCALER = "kube-controller-manager"
"""The field manager of an autoscaler's writes: autoscalers run in it."""

REPLICAS = "replicas"
"""Key in the details of a history entry: the replicas that it was written for."""


@dataclass(frozen=True, slots=True)
class Owner:
    """An object with a pod template, and the path of this pod's template in it.

    ``read``: the object to read from the API for the rest, if the pod does not show enough; it may
    another object, as a pod of a JobSet is created by a Job. None: the pod shows enough.
    ``obstacle``: why its pods are not injected. ``must_be_read``: the pod alone never shows enough.
    """

    api_version: str
    kind: str
    name: str
    path: str
    read: Reference | None = None
    obstacle: str | None = None
    must_be_read: bool = False

    @property
    def group(self) -> str:
        """The API group."""
        return self.api_version.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to an object of the API."""

    api_version: str
    kind: str
    name: str
    uid: str


def owner_of(pod: Mapping[str, Any]) -> Owner | None:
    """Return the object that the pods of one job share; None for a pod without a controller."""
    metadata = pod.get("metadata") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    references = metadata.get("ownerReferences") or []
    maker = next((one for one in references if one.get("controller")), None)
    if maker is None:
        return None
    made_by = Reference(maker["apiVersion"], maker["kind"], maker["name"], maker.get("uid", ""))
    ways = _ways(made_by, labels)
    if ways:
        kind, shown = max(ways, key=lambda way: len(way[1].marks))
        return _shown(kind, shown, made_by, pod)
    owner = Owner(made_by.api_version, made_by.kind, made_by.name, PLAIN_PATH)
    if owner.group not in FRAMEWORKS:
        return owner
    known = " and ".join(kind for group, kind in KINDS if group == owner.group)
    why = f"a {owner.kind} of {owner.group} does not train through Muster: it knows {known}"
    return replace(owner, obstacle=why)


def _ways(maker: Reference, labels: Mapping[str, str]) -> list[tuple[str, PodSigns]]:
    """Return the kinds that a pod of this maker may be of, and how such a pod shows it."""
    of_maker = maker.api_version.rpartition("/")[0], maker.kind
    own = kind_of(maker.api_version, maker.kind)
    ways = [(maker.kind, one) for one in own.shown if one.maker is None] if own else []
    for (*_, kind), row in (*KINDS.items(), *OF_VERSIONS.items()):
        ways += [(kind, one) for one in row.shown if one.maker == of_maker]
    return [(kind, one) for kind, one in ways if _has(labels, one.marks)]


def _has(labels: Mapping[str, str], marks: Iterable[tuple[str, str]]) -> bool:
    return all(label in labels and value in ("", labels[label]) for label, value in marks)


def _shown(kind: str, shown: PodSigns, maker: Reference, pod: Mapping[str, Any]) -> Owner:
    """Return the owner that a pod shows in this way."""
    metadata = pod.get("metadata") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    name = labels.get(shown.named, "") if shown.named else maker.name
    if shown.suffix:
        name = name.removesuffix("-" + labels[shown.suffix])
    part = next((labels[label] for label in shown.parts if labels.get(label)), "")
    if shown.ending and metadata.get("name", "").endswith(f"-{shown.ending}"):
        part = shown.ending
    why = None
    if shown.made and (part not in shown.only or maker.name != shown.made.format(name=name)):
        why = f"its labels are of {kind} {name}, and {maker.kind} {maker.name} is not its launcher"
    elif shown.only and part not in shown.only:
        only = " or ".join(shown.only)
        why = f"no label of a pod of {kind} {name} says whether it is {only}"
    part = part or shown.otherwise or "worker"
    return Owner(
        shown.version or maker.api_version,
        kind,
        name,
        shown.path.format(part=part, Part=part.capitalize()),
        maker if shown.read else None,
        why,
        shown.must_be_read,
    )


def maker_of(owner: Owner, read: Mapping[str, Any]) -> Reference | None:
    """Return the owner itself if ``read`` is the batch Job that it has made; None if it is not.

    The pod of a launcher has the UID of that Job alone, and the Job that of the MPIJob.
    """
    references = (read.get("metadata") or {}).get("ownerReferences") or []
    for one in references:
        maker = Reference(one["apiVersion"], one["kind"], one["name"], one.get("uid", ""))
        if one.get("controller") and (maker.kind, maker.name) == (owner.kind, owner.name):
            return maker
    return None


def manifest_of(
    pod: Mapping[str, Any], namespace: str, owner: Owner | None, read: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str, Role]:
    """Put the pod in place of its owner's template.

    Returns the object, the path of the template in it and the pod's role. ``read`` is the object
    that ``owner.read`` names, as the API has it, or None.
    """
    template = {
        "metadata": dict(pod.get("metadata") or {}),
        "spec": {
            key: value
            for key, value in pod["spec"].items()
            if (key, value) != (GRACE, SERVERS_GRACE_S)
        },
    }
    if owner is None:
        return {"apiVersion": "v1", "kind": "Pod", **template}, "", "worker"
    words = owner.path.split(".")
    beside = _beside(pod, owner, read)
    below: Any = template
    for depth in range(len(words) - 1, 0, -1):
        here = ".".join(words[:depth])
        if words[depth - 1] in ("tasks", "replicatedJobs"):
            below = [{"name": words[depth], **below}]
        else:
            below = {**beside.get(here, {}), words[depth]: below}
    metadata = {"name": owner.name, "namespace": namespace}
    kind = kind_of(owner.api_version, owner.kind)
    is_launcher = kind is not None and owner.path == kind.launcher
    whole = {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "metadata": metadata,
        words[0]: below,
    }
    return whole, owner.path, "launcher" if is_launcher else "worker"


def _beside(
    pod: Mapping[str, Any], owner: Owner, read: Mapping[str, Any] | None
) -> dict[str, Mapping[str, Any]]:
    """Return the owner's fields beside the template, by the path of the mapping that has them."""
    if read is not None:
        spec = dict(read.get("spec") or {})
        parent, *_ = owner.path.rpartition(".")
        if read.get("kind") == "Job":
            # A Job's fields are beside its own template, at any depth within the object that made
            # it.
            return {parent: spec}
        # At each depth: beside a worker's template is the launcher's, whose command has the size.
        beside: dict[str, Mapping[str, Any]] = {}
        below: Any = {"spec": spec}
        for depth, word in enumerate(words := parent.split("."), 1):
            found = below.get(word)
            below = found if isinstance(found, Mapping) else {}
            beside[".".join(words[:depth])] = below
        return beside
    return {}


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of nodes that a new world is to wait for, and the replicas behind it."""

    desired: int
    replicas: int


def replicas_of(owner: Mapping[str, Any]) -> int | None:
    """Return the number of pods with a sidecar that an object asks for; None if it does not say.

    If some of its templates ask for a sidecar, only these count; else all but those that reject
    one.
    """
    kind = kind_of(str(owner.get("apiVersion", "")), str(owner.get("kind")))
    parts = list(kind.counts(owner)) if kind is not None and kind.counts is not None else []
    ours = [part for part in parts if _asks(part)]
    ours = ours or [part for part in parts if _label(part) != "false"]
    return sum(part.pods for part in ours) if ours else None


def _asks(part: TemplateCount) -> bool:
    """Return whether a part's pods ask for a sidecar, or have one from ``muster inject``."""
    annotations = below(below(part.template, "metadata"), "annotations")
    return _label(part) == "true" or ANNOTATION in annotations


def _label(part: TemplateCount) -> Any:
    return below(below(part.template, "metadata"), "labels").get(ASKS)


def is_autoscaled(metadata: Mapping[str, Any]) -> bool:
    """Return whether a HorizontalPodAutoscaler was the last to set an object's replicas.

    A write to ``/scale`` sets nothing else, and each kind has them at a place of its own.
    """
    return any(
        (one.get("manager"), one.get("subresource")) == (AUTOSCALER, "scale")
        and bool(below(below(one, "fieldsV1"), "f:spec"))
        for one in metadata.get("managedFields") or []
        if isinstance(one, Mapping)
    )


def steady_s(wanted: Scale, job: Job, *, autoscaled: bool) -> float:
    """Return how long replicas have to stay as they are before they are written, in seconds.

    An autoscaler may take back in seconds what it has added, and each world costs all ranks a
    restart: its newcomers are gathered, and a larger number does not end the gather window.
    """
    grows = job.desired is not None and wanted.desired > job.desired
    return job.policy.gather_s if autoscaled and grows else 0.0


def desired_nodes(
    replicas: int | None, seen: int | None, job: Job, history: Sequence[HistoryEntry]
) -> tuple[Scale | None, str]:
    """Decide what to write; return it, or None, with the reason in one sentence.

    ``seen`` are the replicas that this process saw before; None if it saw none: then those of
    ``history`` count, which is the job's, the oldest first. A number set by a person stays until
    the replicas change.
    """
    if not replicas:
        return None, "the owner does not say, or is scaled to nothing"
    wanted = min(max(replicas, job.policy.min_nodes), job.policy.max_nodes)
    if job.desired == wanted:
        return None, f"{wanted} nodes are desired already"
    by_person, applied = False, None
    for entry in history:
        if entry.what == "set" and type(entry.details.get(REPLICAS)) is int:
            applied = int(str(entry.details[REPLICAS]))
            by_person = False
        elif entry.what == "set" and "desired" in entry.why:
            by_person = True
    if seen is not None:
        applied = seen
    if by_person and applied in (None, replicas):
        return None, "somebody has set another number by hand, and the replicas are as before"
    return Scale(wanted, replicas), f"its owner has {replicas} replicas"
