# SPDX-License-Identifier: Apache-2.0
"""The rank that keeps a world from going on, found by what each of its ranks does: pure.

Ranks wait for each other in collective operations, so of a world that stands still the rank that is
in none is the cause, or the one that is in another one than the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from rdzv.dataclass import dataclass
from rdzv.records.progress import BUSY, PodSaves, StillRank

Seated = tuple[str, StillRank]
"""A rank with the pod that it is in."""

NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Standstill:
    """A world whose ranks all stand still. ``causes``: the ranks that keep the others waiting.

    There is none if all wait in the same operation.
    """

    causes: tuple[Seated, ...]
    others: str
    since_unix_s: float

    @property
    def why(self) -> str:
        """The causes in one sentence, with what the others do."""
        if not self.causes:
            return f"all ranks {self.others}"
        named = [
            f"rank {one.rank} ({pod}) {one.sentence}{self._led(one)}"
            for pod, one in self.causes[:NAMED_MAX]
        ]
        if len(self.causes) > NAMED_MAX:
            named.append(f"{len(self.causes) - NAMED_MAX} more do not wait for others")
        return "; ".join([*named, f"the others {self.others}" if self.others else ""]).rstrip("; ")

    def _led(self, one: StillRank) -> str:
        """Say how it has come there, if the others are at the same place by another way."""
        same = one.via and one.where and one.sentence.replace("waits", "wait", 1) == self.others
        return f", called from {one.via}" if same else ""

    def do(self, job: str) -> str:
        """Return what to do about the first cause."""
        if not self.causes:
            return "see that the pods reach each other: the network, NCCL_DEBUG=INFO"
        pod, first = self.causes[0]
        stacks = f"its stacks are in progress/*.stacks of the run directory of {pod}"
        return {
            "stopped": f"let it go on (kill -CONT, in {pod}), or muster drain {pod} --job {job}",
            "loader": f"see the data loader's workers and the storage of {pod}; {stacks}",
            "ended": f"read the log of {pod}'s training container",
            "collective": "see that all ranks call the same operations in the same order",
        }.get(first.doing, f"see {first.where or 'its stack'}; {stacks}")


def standstill(members: Sequence[str], told: Sequence[PodSaves]) -> Standstill | None:
    """Return why the world of ``members`` stands still; None if it may be at work.

    ``told``: what they report. It may be at work if a pod does not say that its ranks stand still,
    if a rank does what takes minutes, or if no rank waits for another one.
    """
    still = {one.member: one for one in told if one.still}
    if not members or {*members} - still.keys():
        return None
    ranks = [(name, one) for name in members for one in still[name].still]
    if any(one.doing in BUSY for _, one in ranks):
        return None
    since_unix_s = max(one.still_since_unix_s for one in still.values())
    halted = [one for one in ranks if one[1].doing in ("stopped", "ended")]
    waiting = [one for one in ranks if one[1].doing == "collective"]
    apart = [one for one in ranks if one[1].doing != "collective"]
    if halted:
        return Standstill(tuple(halted), _doing(ranks, halted), since_unix_s)
    if waiting and apart:
        return Standstill(tuple(apart), _doing(ranks, apart), since_unix_s)
    odd = _minority(ranks)
    if odd is None or (apart and not odd):
        return None
    if any(one.doing == "unknown" for _, one in odd):
        return None  # without a rank that waits, one that gives no stack may be at work as others
    return Standstill(tuple(odd), _doing(ranks, odd), since_unix_s)


def _minority(ranks: Sequence[Seated]) -> Collection[Seated] | None:
    """Return those that do not what most do; none if all do the same, None without a majority."""
    groups: dict[tuple[str, ...], list[Seated]] = defaultdict(list)
    led = all(one.via for _, one in ranks)  # a sidecar of an older version does not report it
    for one in ranks:
        groups[one[1].call, one[1].where, one[1].via if led else ""].append(one)
    largest = max(groups.values(), key=len)
    if 2 * len(largest) > len(ranks):
        return [one for one in ranks if one not in largest]
    return ranks if all(one.doing == "collective" for _, one in ranks) else None


def _doing(ranks: Sequence[Seated], causes: Collection[Seated]) -> str:
    """Return what most of those do that are no cause; empty if there are none."""
    rest = [one.sentence for pod, one in ranks if (pod, one) not in causes]
    if not rest:
        return ""
    most = max(sorted({*rest}), key=rest.count)
    return most.replace("waits ", "wait ").replace("is ", "are ", 1)
