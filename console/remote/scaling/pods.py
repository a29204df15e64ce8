# SPDX-License-Identifier: Apache-2.0
"""A job's pods as scaling sees them: the API server's view and the store's beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from console.remote.pods import JobPod
from console.remote.scaling.owner import ScaledOwner
from injection.kinds import KINDS, Kind, kind_of

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of a pod: a ReplicaSet takes the pods with the lowest number first."""

TRAINS = frozenset({"training", "finishing"})
"""Activities of a member that has a place in a world."""

TAKES_PART = frozenset({"listed", "standby"})
"""States of a member that a world may have."""


@dataclass(frozen=True, slots=True)
class ScaledPod:
    """One pod of a job.

    ``index``: -1 without one. ``node``: empty before it is placed. ``template``: the path of its
    own in its owner; ``launcher``: that of a launcher; ``fixed``: one whose pods are not scaled.
    ``maker``: the object that made it. ``pending``: no container of it has started; ``why``.
    ``over``: all of its containers have ended. ``created_s``: Unix time, 0.0 if unknown. ``cost``:
    its deletion cost, if a scale-in gives it one. ``state`` and ``doing``: those of its member in
    the store, empty without one. ``step``: the last one that it has reported. ``waits``: the share
    of its time that its slowest rank waits for others; None if unknown.
    """

    name: str
    uid: str = ""
    index: int = -1
    node: str = ""
    template: str = ""
    launcher: bool = False
    fixed: bool = False
    maker: str = ""
    pending: bool = False
    why: str = ""
    ready: bool = True
    deleting: bool = False
    over: bool = False
    created_s: float = 0.0
    cost: int = 0
    spot: bool = False
    state: str = ""
    doing: str = ""
    step: int | None = None
    waits: float | None = None

    @property
    def trains(self) -> bool:
        """Whether it has a place in a world."""
        return self.doing in TRAINS

    @property
    def is_silent(self) -> bool:
        """Whether it is a host of a horovodrun none of whose ranks has reported anything there."""
        return self.takes_part and self.doing == "ready"

    @property
    def takes_part(self) -> bool:
        """Whether it is a member that a world may have, and all its containers are ready."""
        return self.ready and not self.deleting and self.state in TAKES_PART

    @property
    def described(self) -> str:
        """Its activity, in a few words."""
        if not self.state:
            # The scheduler's first sentence says what is missing, the others what it tried.
            why = self.why.partition(". ")[0]
            return f"not started ({why})" if why else "not a member yet"
        step = "" if self.step is None else f" at step {self.step:,}"
        return f"{self.doing or self.state}{step}"


def scaled_pod(pod: JobPod) -> ScaledPod:
    """Reduce a pod to what scaling needs."""
    owner, template = pod.owner, pod.owner.path if pod.owner else ""
    kind = (kind_of(owner.api_version, owner.kind) if owner else None) or Kind(())
    return ScaledPod(
        name=pod.name,
        uid=pod.uid,
        index=_index(pod.labels, pod.name, kind),
        node=pod.node,
        template=template,
        launcher=bool(template) and template == kind.launcher,
        maker=pod.maker[1] if pod.maker else "",
        pending=pod.phase == "Pending",
        why=pod.why_pending,
        ready=pod.ready,
        deleting=pod.deleting,
        over=pod.phase in ("Succeeded", "Failed"),
        created_s=pod.created_unix_s,
        spot=bool(pod.spot),
    )


def joined(
    pods: Iterable[ScaledPod], owner: ScaledOwner, members: Iterable[Mapping[str, Any]]
) -> tuple[ScaledPod, ...]:
    """Return the pods that ``owner`` counts, with their members as ``muster status`` has them.

    Pods whose containers have ended are left out.
    """
    by_name = {str(one.get("name")): one for one in members}
    found = []
    for pod in pods:
        if pod.over or pod.launcher:
            continue
        member = by_name.get(pod.name, {})
        step, waits = member.get("step"), member.get("waits")
        found.append(
            replace(
                pod,
                fixed=pod.template not in ("", owner.template),
                state=str(member.get("state") or ""),
                doing=str(member.get("doing") or ""),
                step=step if type(step) is int else None,
                waits=waits if type(waits) in (int, float) else None,
            )
        )
    return tuple(sorted(found, key=lambda pod: (pod.index, pod.created_s, pod.name)))


def _index(labels: Mapping[str, str], name: str, kind: Kind) -> int:
    """Return the index by a label, whichever object made the pod, or by its name."""
    of_label = (row.index_label for row in KINDS.values() if row.index_label in labels)
    label = next(of_label, None)
    number = labels[label] if label else ""
    pattern = kind.scaled.index if kind.scaled is not None else None
    if not number and pattern is not None and (found := pattern.search(name)):
        number = found[1]
    return int(number) if number.isdecimal() else -1
