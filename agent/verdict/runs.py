# SPDX-License-Identifier: Apache-2.0
"""The worlds of a job: the newest round of each rendezvous, and the ranks that hold it up. Pure.

Ranks leave a step together. So the time that a rank does not wait for others is its own, and the
rank that waits least makes the step as long as it is. Ranks wait for each other in collective
operations: of a world that stands still the rank that is in none is the cause, or the one that is
in another one than the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from launcher_shim.c10d.rounds.records import Node, Round
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import GenerationKeys
from rdzv.records.progress import BUSY, PodSaves, StillRank
from rdzv.records.world import WorldChange
from rdzv.snapshot import Places
from rdzv.store import KeyValue

ALIKE = 0.1
"""Difference of two shares of waiting up to which two ranks are as slow as each other."""

WORTH = 0.2
"""Cost from which on stragglers are worth a sentence: less is in the noise of small steps."""

NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class RunView:
    """One torch rendezvous: its newest round, and the nodes that take part or wait."""

    run_id: str
    round: Round
    nodes: tuple[Node, ...]
    change: WorldChange | None = None
    """The newest change of a world that changes in place; None if it never was one."""

    @property
    def in_place(self) -> str:
        """Whether its world changes in place, in one sentence; empty if nothing was tried."""
        change = self.change
        if change is None or change.round != self.round.number or self.round.closed:
            return ""
        if change.phase == "fall-back":
            return f"{self.run_id} changes by a save and a restart: {change.reason}"
        world = self.round.world
        return f"{self.run_id} changes in place: its ranks are in world {world}" if world else ""

    @property
    def state(self) -> str:
        """The state of the round, in a word or two."""
        if self.round.closed:
            return f"closed ({self.round.closed})"
        if self.round.finishing:
            return "finishing"
        return "training" if self.round.complete else "forming"

    @property
    def places(self) -> Places:
        """The members that have a place in the round, and those that ask for one."""
        frozen = {seat.member: seat for seat in self.round.frozen}
        gone = {
            node.member
            for node in self.nodes
            if node.state == "left" or node.seat != frozen.get(node.member)
        }
        return Places(
            frozenset(frozen) - gone,
            frozenset(node.member for node in self.nodes if node.state == "asking"),
        )


def runs_of(keys: GenerationKeys, kvs: Iterable[KeyValue]) -> tuple[RunView, ...]:
    """Return the runs of a generation, by their ids; omit unreadable records."""
    rounds: dict[str, Round] = {}
    nodes: dict[str, list[Node]] = {}
    changes: dict[str, WorldChange] = {}
    for kv in kvs:
        if not kv.key.startswith(keys.runs):
            continue
        run_id = keys.run_id_of(kv.key)
        run = keys.run(run_id)
        try:
            if kv.key == run.round:
                rounds[run_id] = Round.from_kv(kv)
            elif kv.key.startswith(run.nodes):
                nodes.setdefault(run_id, []).append(Node.from_kv(kv))
            elif kv.key == run.world:
                changes[run_id] = WorldChange.from_kv(kv)
        except RecordError:
            continue
    return tuple(
        RunView(
            run_id,
            rounds.get(run_id, Round()),
            tuple(nodes.get(run_id, ())),
            changes.get(run_id),
        )
        for run_id in sorted(rounds.keys() | nodes.keys())
    )


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slowest ranks of a world, each with its pod: at most half of all.

    ``waits``: the least share of waiting among them; ``others``: that of all others.
    """

    ranks: tuple[tuple[str, int], ...]
    waits: float
    others: float

    @property
    def cost(self) -> float:
        """The share of each step by which it would be shorter without them."""
        return self.others - self.waits

    @property
    def sentence(self) -> str:
        """Their names and their cost."""
        named = ", ".join(f"rank {rank} ({pod})" for pod, rank in self.ranks[:NAMED_MAX])
        if len(self.ranks) > NAMED_MAX:
            named += f" and {len(self.ranks) - NAMED_MAX} more"
        return (
            f"all others wait for {named}: at least {self.others:.0%} of each step, and a step"
            f" would take {self.cost:.0%} less without"
        )


def waits_of(told: Sequence[PodSaves]) -> Mapping[str, float]:
    """Return the share of waiting of each pod whose ranks report it: that of its slowest rank."""
    return {one.member: min(one.waits) for one in told if one.waits}


def straggler(members: Sequence[str], told: Sequence[PodSaves]) -> Straggler | None:
    """Return the ranks that hold the world of ``members`` up; None if none do, or one is unknown.

    ``told``: what the pods report.
    """
    known = [one for one in told if one.waits]
    if not members or {one.member for one in known} != {*members}:
        return None
    shares = sorted(
        (share, one.member, rank)
        for one in known
        for rank, share in zip(one.ranks, one.waits, strict=True)
    )
    least = shares[0][0]
    slow = [one for one in shares if one[0] <= least + ALIKE]
    rest = shares[len(slow) :]
    if len(slow) > len(rest) or not rest or rest[0][0] - least < WORTH:
        return None
    return Straggler(tuple((pod, rank) for _, pod, rank in slow), least, rest[0][0])


Seated = tuple[str, StillRank]
"""A rank with the pod that it is in."""


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
