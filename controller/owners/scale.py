# SPDX-License-Identifier: Apache-2.0
"""How many nodes a job is to have, as its owner's replicas say: a pure function of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rdzv.records.history import HistoryEntry
from rdzv.records.job import Job

REPLICAS = "replicas"
"""In the details of a history entry: the replicas that it was written for."""

_PATHS: Mapping[str, tuple[str, ...]] = {
    "Deployment": ("replicas",),
    "StatefulSet": ("replicas",),
    "Job": ("parallelism",),
    "PyTorchJob": ("pytorchReplicaSpecs", "*", "replicas"),
}
"""Below ``spec``; the sum where there are several. Of other kinds nothing is known."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of nodes that a new world is to wait for, and the replicas that say so."""

    desired: int
    replicas: int


def replicas_of(owner: Mapping[str, Any]) -> int | None:
    """How many pods an object is to have; None where it does not say."""
    path = _PATHS.get(str(owner.get("kind")))
    return None if path is None else _sum(owner.get("spec"), path)


def _sum(found: Any, path: tuple[str, ...]) -> int | None:
    if not path:
        return found if type(found) is int else None
    if not isinstance(found, dict):
        return None
    below = found.values() if path[0] == "*" else [found.get(path[0])]
    numbers = [number for one in below if (number := _sum(one, path[1:])) is not None]
    return sum(numbers) if numbers else None


def decide(
    replicas: int | None, seen: int | None, job: Job, history: Sequence[HistoryEntry]
) -> tuple[Scale | None, str]:
    """Say what is to be written, and one sentence of reason.

    ``seen`` are the replicas as this process saw them before. ``history`` is the job's, the oldest
    first. What a person has set stays until the replicas change.
    """
    if not replicas:
        return None, "the owner does not say, or is scaled to nothing"
    wanted = min(max(replicas, job.min_workers), job.max_workers)
    if job.desired == wanted:
        return None, f"{wanted} nodes are desired already"
    by_person, applied = False, seen
    for entry in history:
        if entry.what == "set" and type(entry.details.get(REPLICAS)) is int:
            applied = int(str(entry.details[REPLICAS]))
            by_person = False
        elif entry.what == "set" and "desired" in entry.why:
            by_person = True
    if by_person and applied in (None, replicas):
        return None, "somebody has set another number by hand, and the replicas are as before"
    return Scale(wanted, replicas), f"its owner has {replicas} replicas"
