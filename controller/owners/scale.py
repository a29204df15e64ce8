# SPDX-License-Identifier: Apache-2.0
"""The desired number of nodes from the owner's replicas: a pure function of job and owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from injection.annotations import ANNOTATION
from injection.settings import ASKS
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Job

AUTOSCALER = "kube-controller-manager"
"""The field manager of an autoscaler's writes: autoscalers run in it."""

REPLICAS = "replicas"
"""Key in the details of a history entry: the replicas that it was written for."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of nodes that a new world is to wait for, and the replicas behind it."""

    desired: int
    replicas: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One pod template of an object, and the number of pods created from it."""

    template: Mapping[str, Any]
    pods: int

    @property
    def is_ours(self) -> bool:
        """Whether its pods ask for a sidecar, or have one from ``muster inject``."""
        metadata = _below(self.template, "metadata")
        asks = _below(metadata, "labels").get(ASKS) == "true"
        return asks or ANNOTATION in _below(metadata, "annotations")

    @property
    def refuses(self) -> bool:
        """Whether its pods reject a sidecar, even if their namespace asks for one."""
        return _below(_below(self.template, "metadata"), "labels").get(ASKS) == "false"


def replicas_of(owner: Mapping[str, Any]) -> int | None:
    """Return the number of pods with a sidecar that an object asks for; None if it does not say.

    If some of its templates ask for a sidecar, only these count; else all but those that reject
    one.
    """
    parts = list(_parts(str(owner.get("kind")), _below(owner, "spec")))
    ours = [part for part in parts if part.is_ours]
    ours = ours or [part for part in parts if not part.refuses]
    return sum(part.pods for part in ours) if ours else None


def _parts(kind: str, spec: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield the templates whose pods train; none for an unknown kind."""
    match kind:
        case "Deployment" | "StatefulSet" if "replicas" in spec:
            yield _Part(_below(spec, "template"), _count(spec, "replicas"))
        case "Job" if "parallelism" in spec:
            yield _of_job(spec)
        case "PyTorchJob":
            for replica in _below(spec, "pytorchReplicaSpecs").values():
                yield _of_replica(replica)
        case "MPIJob" if "Worker" in _below(spec, "mpiReplicaSpecs"):
            # The launcher does not train.
            yield _of_replica(spec["mpiReplicaSpecs"]["Worker"])
        case "JobSet":
            for job in spec.get("replicatedJobs") or []:
                part = _of_job(_below(_below(job, "template"), "spec"))
                yield _Part(part.template, part.pods * _count(job, "replicas"))
        case "LeaderWorkerSet":
            yield from _of_groups(_count(spec, "replicas"), _below(spec, "leaderWorkerTemplate"))


def _of_replica(replica: Any) -> _Part:
    return _Part(_below(replica, "template"), _count(replica, "replicas"))


def _of_job(spec: Mapping[str, Any]) -> _Part:
    """Return a Job's part; no more pods run at a time than have to complete."""
    pods = _count(spec, "parallelism")
    return _Part(_below(spec, "template"), min(pods, _count(spec, "completions", pods)))


def _of_groups(groups: int, group: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield the parts of a LeaderWorkerSet; a leader without a template of its own is a worker."""
    if not group:
        return
    size, leader = _count(group, "size"), group.get("leaderTemplate")
    if leader is not None:
        yield _Part(_below(group, "leaderTemplate"), groups)
        size -= 1
    yield _Part(_below(group, "workerTemplate"), groups * size)


def _below(found: Any, key: str) -> Mapping[str, Any]:
    below = found.get(key) if isinstance(found, Mapping) else None
    return below if isinstance(below, Mapping) else {}


def _count(found: Any, key: str, otherwise: int = 1) -> int:
    """Return a number of pods; ``otherwise``, the API server's or operator's default, if unset."""
    number = found.get(key) if isinstance(found, Mapping) else None
    return number if type(number) is int else otherwise


def is_autoscaled(metadata: Mapping[str, Any]) -> bool:
    """Return whether a HorizontalPodAutoscaler was the last to set an object's replicas."""
    return any(
        (one.get("manager"), one.get("subresource")) == (AUTOSCALER, "scale")
        and "f:replicas" in _below(_below(one, "fieldsV1"), "f:spec")
        for one in metadata.get("managedFields") or []
        if isinstance(one, Mapping)
    )


def steady_s(wanted: Scale, job: Job, *, autoscaled: bool) -> float:
    """Return how long replicas have to stay as they are before they are written, in seconds.

    An autoscaler may take back in seconds what it has added, and each world costs all ranks a
    restart: its newcomers are gathered, and a larger number does not end the gather window.
    """
    grows = job.desired is not None and wanted.desired > job.desired
    return job.gather_s if autoscaled and grows else 0.0


def decide(
    replicas: int | None, seen: int | None, job: Job, history: Sequence[HistoryEntry]
) -> tuple[Scale | None, str]:
    """Decide what to write; return it, or None, with the reason in one sentence.

    ``seen`` are the replicas that this process saw before; None if it saw none: then those of
    ``history`` count, which is the job's, the oldest first. A number set by a person stays until
    the replicas change.
    """
    if not replicas:
        return None, "the owner does not say, or is scaled to nothing"
    wanted = min(max(replicas, job.min_workers), job.max_workers)
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
