# SPDX-License-Identifier: Apache-2.0
"""The plans of a scale-out, with the pods that came, and of a scale-in, with who leaves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from console.help import near
from console.remote.scaled_owner import ScaledOwner, ScaledPod
from launcher_shim.pod.launchers import CENTRAL
from rdzv.records.policy import JobPolicy
from rdzv.sentences import counted

COST = -(2**31)
"""The deletion cost of a pod that is to go: the lowest that Kubernetes takes."""


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
    owner: ScaledOwner, sizes: JobPolicy | None, count: int, *, raises_max: bool
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
    if count > sizes.max_nodes:
        if not raises_max:
            return None, (
                f"max is {sizes.max_nodes}, and pods beyond it only stand by: add --max to raise it"
                f" to {count}"
            )
        most = count
    room = JobPolicy(sizes.min_nodes, most or sizes.max_nodes, sizes.sizes, sizes.unit).largest(
        count
    )
    by = f", and {count - room} of them will stand by: it trains in sizes" if room < count else ""
    return ScaleOutPlan(
        owner.count, count, room, most
    ), f"the job may have {most or sizes.max_nodes}{by}"


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
    """Describe a central launcher's hosts of which some report nothing; empty if all ranks report.

    What the launcher does with a host, it says nowhere.
    """
    if not (silent := [pod.name for pod in pods if pod.is_silent]):
        return ""
    listed = sum(pod.takes_part and pod.state == "listed" for pod in pods)
    are = "pod is ready and a listed host" if listed == 1 else "pods are ready and listed hosts"
    return (
        f"{listed} {are} of {CENTRAL.name}; no rank on {', '.join(silent)} has reported a step, so"
        f" whether it trains there is not known: muster logs {job} shows its lines"
    )


def waiting(pods: Sequence[ScaledPod]) -> str:
    """Describe the pods that do not take part yet; empty if all do."""
    missing = [pod for pod in pods if not pod.takes_part and not pod.deleting]
    return "; ".join(f"{pod.name} {pod.described}" for pod in missing)


@dataclass(frozen=True, slots=True)
class WhoLeaves:
    """The pods that a user wants to go: by ``names``, on ``node``, or ``count`` of them.

    ``spot_first``: a count takes those on spot nodes first. ``slowest``: it takes those that the
    others wait for most.
    """

    count: int | None = None
    names: tuple[str, ...] = ()
    node: str = ""
    spot_first: bool = False
    slowest: bool = False

    @property
    def by_count(self) -> bool:
        """Whether the owner may choose."""
        return self.count is not None and not self.spot_first and not self.slowest


@dataclass(frozen=True, slots=True)
class ScaleInPlan:
    """The pods that go, and the owner's count after it; a ``count`` of None leaves it."""

    pods: tuple[ScaledPod, ...]
    count: int | None

    @property
    def drains(self) -> tuple[ScaledPod, ...]:
        """Those to drain first; the others are no members yet, and have nothing to save."""
        return tuple(pod for pod in self.pods if pod.state and not pod.deleting)


def departure(
    owner: ScaledOwner,
    pods: Sequence[ScaledPod],
    sizes: JobPolicy | None,
    selection: WhoLeaves,
    *,
    idle: bool = False,
) -> tuple[ScaleInPlan | None, str]:
    """Decide who goes; return it, or None, with the reason in one sentence.

    ``sizes`` are the job's, None if unknown. ``idle``: the count stays, and the pods idle.
    """
    there = [pod for pod in pods if not pod.deleting]
    chosen, why = _chosen(owner, there, selection)
    if not chosen and not selection.by_count:
        return None, why
    gone = selection.count if selection.by_count and selection.count else len(chosen)
    after = owner.count - gone
    if after < owner.minimum:
        return None, f"{owner} has a count of {owner.count}, and takes none below {owner.minimum}"
    if refusal := _below_min(there, chosen, owner.count if idle else after, sizes):
        return None, refusal
    if idle:
        return ScaleInPlan(chosen, None), f"the count of {owner} stays {owner.count}"
    if owner.ordinal:
        taken = _highest(owner, there, after)
        if {pod.name for pod in taken} != {pod.name for pod in chosen}:
            return None, _other_goes(owner, chosen, taken)
        return ScaleInPlan(chosen, after), "the highest indexes go"
    if len({pod.maker for pod in there}) > 1:
        return (
            None,
            f"{owner} is being rolled out: wait until kubectl rollout status says it is not",
        )
    drained = [replace(pod, ready=False, cost=COST) if pod in chosen else pod for pod in there]
    if first := ahead_of(drained, [pod.name for pod in chosen]):
        names = ", ".join(pod.name for pod in first)
        which = "it takes" if len(first) == 1 else "they take"
        return None, (
            f"the ReplicaSet of {owner} takes {names} first, as {which} no part yet: scale in by"
            f" {'it' if len(first) == 1 else 'those'}, or wait"
        )
    return ScaleInPlan(chosen, after), why


def ahead_of(pods: Iterable[ScaledPod], names: Sequence[str]) -> list[ScaledPod]:
    """Return the pods that a ReplicaSet may take before the last one of ``names``.

    As Kubernetes ranks them: those without a node, those that have not started, those that are not
    ready, then those with the lowest deletion cost.
    """
    there = [pod for pod in pods if not pod.deleting]
    last = max((_rank(pod) for pod in there if pod.name in names), default=None)
    if last is None:
        return []
    return [pod for pod in there if pod.name not in names and _rank(pod) <= last]


def _rank(pod: ScaledPod) -> tuple[bool, bool, bool, int]:
    return bool(pod.node), not pod.pending, pod.ready, pod.cost


def _chosen(
    owner: ScaledOwner, pods: Sequence[ScaledPod], selection: WhoLeaves
) -> tuple[tuple[ScaledPod, ...], str]:
    """Return the pods that the user means, and why them; none with the refusal."""
    by_name = {pod.name: pod for pod in pods}
    if selection.names:
        for name in selection.names:
            if name not in by_name:
                hint = f"did you mean {close}? " if (close := near(name, by_name)) else ""
                have = ", ".join(by_name) or "none"
                return (), f"there is no pod {name}: {hint}its pods are {have}"
        chosen = tuple(by_name[name] for name in dict.fromkeys(selection.names))
        return chosen, "as named"
    if selection.node:
        chosen = tuple(pod for pod in pods if pod.node == selection.node)
        nodes = ", ".join(sorted({pod.node for pod in pods if pod.node})) or "none"
        elsewhere = f"no pod is on node {selection.node}: they are on {nodes}"
        return chosen, f"those on node {selection.node}" if chosen else elsewhere
    count = selection.count or 1
    if selection.slowest:
        return _slowest(pods, count)
    if owner.ordinal and not selection.spot_first:
        return _highest(owner, pods, owner.count - count), "the highest indexes"
    if count > len(pods):
        return (), f"{counted(len(pods), 'pod')} cannot become {count} fewer"
    ranked = sorted(pods, key=lambda pod: _order(pod, spot_first=selection.spot_first))
    spot = ", on spot nodes first" if selection.spot_first else ""
    return tuple(ranked[:count]), f"first those that do not train, then the youngest{spot}"


def _slowest(pods: Sequence[ScaledPod], count: int) -> tuple[tuple[ScaledPod, ...], str]:
    """Return the pods whose ranks wait least for others: these make each step as long as it is."""
    train = [pod for pod in pods if pod.trains]
    unknown = ", ".join(pod.name for pod in train if pod.waits is None)
    if unknown or not train:
        why = f"{unknown} reports no share of waiting" if unknown else "no pod trains"
        return (), f"who is slowest is not known: {why} (muster top)"
    ranked = sorted(train, key=lambda pod: (pod.waits, pod.name))
    if count > len(ranked):
        return (), f"{counted(len(ranked), 'pod')} that train cannot become {count} fewer"
    chosen, others = ranked[:count], ranked[count:]
    spelt = ", ".join(f"{pod.name} waits {pod.waits:.0%} of its time" for pod in chosen)
    least = f", the others {others[0].waits:.0%} or more" if others else ""
    return tuple(chosen), f"{spelt}{least}"


def _order(pod: ScaledPod, *, spot_first: bool) -> tuple[object, ...]:
    """Order pods by what their end costs, the cheapest first."""
    spot = spot_first and not pod.spot
    # A ReplicaSet takes the first three in this order, whatever deletion cost they have.
    started = (bool(pod.node), not pod.pending, pod.ready)
    return spot, *started, pod.trains, -pod.created_s, -pod.index, pod.name


def _highest(owner: ScaledOwner, pods: Sequence[ScaledPod], after: int) -> tuple[ScaledPod, ...]:
    least = owner.first + after - owner.fixed
    taken = (pod for pod in pods if pod.index >= least and not pod.fixed)
    return tuple(sorted(taken, key=lambda pod: -pod.index))


def _other_goes(owner: ScaledOwner, chosen: Sequence[ScaledPod], taken: Sequence[ScaledPod]) -> str:
    wanted = ", ".join(pod.name for pod in chosen)
    highest = ", ".join(pod.name for pod in taken) or "a pod that is not there yet"
    count = len(chosen)
    return (
        f"{owner} drops its highest indexes: {highest} would go, and not {wanted}. --count {count}"
        f" takes {highest}; --idle drains {wanted} and leaves the count, so that"
        f" {'it idles' if count == 1 else 'they idle'}"
    )


def _below_min(
    pods: Sequence[ScaledPod], chosen: Sequence[ScaledPod], after: int, sizes: JobPolicy | None
) -> str:
    if sizes is None:
        return ""
    before = [pod for pod in pods if pod.takes_part]
    left = [pod for pod in before if pod not in chosen]
    least = sizes.smallest
    if after >= least and (len(left) >= least or len(before) < least or len(left) == len(before)):
        return ""
    remain = min(after, len(left)) if len(before) >= least else after
    return (
        f"{counted(remain, 'pod')} would be left to train, and min is {least}: lower it first by"
        f" muster set --min {remain}" + ("" if remain else ", or use muster pause")
    )
