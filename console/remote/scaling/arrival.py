# SPDX-License-Identifier: Apache-2.0
"""The count that a scale-out asks for, and how many pods have come: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from console.remote.scaling.owner import ScaledOwner
from console.remote.scaling.pods import ScaledPod
from rdzv.records.template import Sizes
from rdzv.sentences import counted


@dataclass(frozen=True, slots=True)
class ScaleOutPlan:
    """The owner's count before and after.

    ``world``: the pods that will train, as the others stand by. ``most``: the bound to set, None to
    leave it.
    """

    before: int
    count: int
    world: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Came:
    """The progress of a scale-out.

    ``count``: the pods of which all take part, as the owner's count is to be if nothing more
    comes. ``complete``: whether all take part; ``trains``: whether as many train as there can;
    ``listed``: whether as many could.
    """

    count: int
    complete: bool
    trains: bool
    listed: bool = False


def arrival(
    owner: ScaledOwner, sizes: Sizes | None, count: int, *, raises_max: bool
) -> tuple[ScaleOutPlan | None, str]:
    """Decide what to ask for; return it, or None, with the reason in one sentence.

    ``count`` is the number of pods to have. ``sizes`` are the job's, None if unknown.
    """
    if count < owner.count:
        return None, f"{owner} has {owner.count} already: muster scalein makes it fewer"
    if count == owner.count:
        return ScaleOutPlan(count, count, 0), f"{owner} has {count} already"
    if sizes is None:
        unknown = "no sidecar answers, so its min and max are unknown"
        return ScaleOutPlan(owner.count, count, count), unknown
    if count < sizes.smallest:
        return None, f"no world forms of {count}: min is {sizes.smallest}"
    most = None
    if count > sizes.most:
        if not raises_max:
            return None, (
                f"max is {sizes.most}, and pods beyond it only stand by: add --max to raise it to"
                f" {count}"
            )
        most = count
    room = Sizes(sizes.least, most or sizes.most, sizes.allowed, sizes.unit).largest(count)
    by = f", and {count - room} of them will stand by: it trains in sizes" if room < count else ""
    return ScaleOutPlan(
        owner.count, count, room, most
    ), f"the job may have {most or sizes.most}{by}"


def came(arrival: ScaleOutPlan, pods: Sequence[ScaledPod], *, paused: bool = False) -> Came:
    """Judge how many of the pods take part; never fewer than there were before."""
    here = [pod for pod in pods if pod.takes_part]
    complete = len(here) >= arrival.count
    trains = complete and (paused or sum(pod.trains for pod in here) >= arrival.world)
    listed = complete and sum(pod.state == "listed" for pod in here) >= arrival.world
    return Came(max(arrival.before, min(arrival.count, len(here))), complete, trains, listed)


def withdrawn(
    owner: ScaledOwner, pods: Sequence[ScaledPod], count: int
) -> tuple[list[ScaledPod], str]:
    """Return the pods that go if the count becomes ``count``, and a sentence on them.

    An owner with indexes may take one that has come, and keep one that has not, which then has its
    room.
    """
    there = [pod for pod in pods if not pod.deleting]
    if owner.ordinal:
        least = owner.first + count - owner.fixed
        gone = [pod for pod in there if pod.index >= least and not pod.fixed]
    else:
        gone = [pod for pod in there if not pod.takes_part]
    if not gone:
        return gone, "nothing is withdrawn"
    names = ", ".join(pod.name for pod in gone)
    sentence = f"{counted(len(gone), 'pod')} withdrawn: {names}"
    lost = [pod.name for pod in gone if pod.takes_part]
    if lost:
        sentence += (
            f"; {', '.join(lost)} had come, but {owner} drops its highest indexes, and a lower one"
            " gets the room"
        )
    return gone, sentence


def hosts(pods: Sequence[ScaledPod], job: str) -> str:
    """Describe the hosts of a horovodrun of which some report nothing; empty if all ranks report.

    What horovodrun does with a host, it says nowhere.
    """
    if not (silent := [pod.name for pod in pods if pod.is_silent]):
        return ""
    listed = sum(pod.takes_part and pod.state == "listed" for pod in pods)
    are = "pod is ready and a listed host" if listed == 1 else "pods are ready and listed hosts"
    return (
        f"{listed} {are} of horovodrun; no rank on {', '.join(silent)} has reported a step, so"
        f" whether it trains there is not known: muster logs {job} shows its lines"
    )


def waiting(pods: Sequence[ScaledPod]) -> str:
    """Describe the pods that do not take part yet; empty if all do."""
    missing = [pod for pod in pods if not pod.takes_part and not pod.deleting]
    return "; ".join(f"{pod.name} {pod.described}" for pod in missing)
