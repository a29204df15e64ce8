# SPDX-License-Identifier: Apache-2.0
"""The desired number of nodes from the owner's replicas: a pure function of job and owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from injection.annotations import ANNOTATION
from injection.counts import TemplateCount, below
from injection.kinds import kind_of
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
