# SPDX-License-Identifier: Apache-2.0
"""Three pods of one rank each in a world that changes in place, with each send apart.

The decision and the reports are the product's. What a rank shows to its sidecar, what that stores,
what it shows of the store, and when the rank looks, are steps of their own; a collective is one of
all its ranks, and a crash in one leaves any part of them a step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random
from typing import NamedTuple

from agent.world.report import report_of
from launcher_shim.c10d.rounds.records import Seat
from rdzv.records.progress import RankInWorld, RankProgress
from rdzv.records.sizes import Sizes
from rdzv.records.world import WorldChange, WorldReport
from rdzv.world.decision import WorldDecision, WorldPolicy, WorldSnapshot, decide
from tests.support.models.explorer import Broken, put

POLICY = WorldPolicy()
STEPS = 2
NAMES = "abc"


class Shown(NamedTuple):
    """What a sidecar shows its rank."""

    change: WorldChange
    world: int
    members: tuple[str, ...]


class Rank(NamedTuple):
    """One rank, and its sidecar. ``history``: the worlds in which its state made each step."""

    shown: Shown
    alive: bool = True
    leaving: bool = False
    came: bool = False
    """Whether it is there from the start."""
    number: int = -1
    step: int = 0
    history: tuple[int, ...] = ()
    epoch: int = 0
    held: int = 0
    formed: int = 0
    broken: int = 0
    failed: int = 0
    ready: bool = True
    tried: int = 0
    group: int = 0
    joins: bool = False
    """Whether it waits for the others in the first meeting of world ``tried``."""
    goes: bool = False
    """Whether it has begun its next step."""
    report: WorldReport | None = None
    vote_of: WorldChange = WorldChange()


class Job(NamedTuple):
    """All of them, and the store."""

    change: WorldChange
    world: int
    members: tuple[str, ...]
    ranks: tuple[Rank, ...]
    tried: tuple[tuple[int, tuple[str, ...]], ...] = ()
    faults: int = 0
    drains: int = 0
    crashed: bool = False


Plant = Callable[[WorldDecision, WorldSnapshot], WorldDecision]


def as_it_is(decision: WorldDecision, snapshot: WorldSnapshot) -> WorldDecision:
    """No plant."""
    return decision


@dataclass
class Worlds:
    """The model. ``faults`` crashes, ``drains`` of ``a``; ``least``: the job's ``min``."""

    faults: int = 0
    drains: int = 0
    joins: bool = True
    three: bool = False
    """Whether all three are in the first world."""
    least: int = 1
    plant: Plant = as_it_is
    hurries: bool = False
    """Planted: a pod that leaves gets its SIGTERM before the others have formed."""
    boasts: bool = False
    """Planted: a rank says that it has formed a world before it has its state."""
    believes: bool = False
    """Planted: a vote does not count the step that a rank may have begun."""
    rare: float = field(default=0.15, init=False)

    def start(self) -> Job:
        """Two pods whose ranks have come, and a third one beside them."""
        change = WorldChange(round=7)
        members = tuple(NAMES if self.three else NAMES[:2])
        shown = Shown(change, 0, members)
        ranks = tuple(Rank(shown, came=name in members) for name in NAMES)
        return Job(change, 0, members, ranks, faults=self.faults, drains=self.drains)

    def begin_walk(self) -> None:
        """Nothing is kept between walks."""

    def key(self, state: Job) -> Hashable:
        """Every state is another one."""
        return state

    def pick(self, random: Random, state: Job, steps: list[tuple[str, Job]]) -> tuple[str, Job]:
        """Any of them."""
        return random.choice(steps)

    # -- steps

    def offered(
        self, state: Job, random: Random | None
    ) -> tuple[list[tuple[str, Job]], Iterator[tuple[str, Job]]]:
        """What goes on, and the faults."""
        going = list(self._going_on(state))
        if not going and (timed := self._decided(state, 1e6)) is not None:
            going = [("time", timed)]
        return going, self._faults(state)

    def _going_on(self, state: Job) -> Iterator[tuple[str, Job]]:
        if (decided := self._decided(state, 0.0)) is not None:
            yield "decide", decided
        for at, rank in enumerate(state.ranks):
            name = NAMES[at]
            if not rank.alive or not rank.came:
                continue
            now = Shown(state.change, state.world, state.members)
            if rank.shown != now:
                yield f"show {name}", _with(state, at, shown=now)
            told = self._told(name, rank)
            if told != rank.report or rank.vote_of != rank.shown.change:
                yield f"tell {name}", _with(state, at, report=told, vote_of=rank.shown.change)
            looked = self._looked(name, rank)
            if looked != rank:
                yield f"look {name}", state._replace(ranks=put(state.ranks, at, looked))
            if self._released(state, name, rank):
                yield f"release {name}", self._gone(state, at)
            if self._cannot_go_on(state, rank):
                broken = {"goes": False, "group": 0, "broken": rank.group}
                failed = {"joins": False, "failed": rank.tried}
                yield f"fail {name}", _with(state, at, **(failed if rank.joins else broken))
        yield from self._collectives(state)

    def _collectives(self, state: Job) -> Iterator[tuple[str, Job]]:
        for number, seats in state.tried:
            of = [at for at, name in enumerate(NAMES) if name in seats]
            ranks = [state.ranks[at] for at in of]
            if all(one.alive and one.joins and one.tried == number for one in ranks):
                yield f"meet {number}", self._met(state, number, of)
            if all(one.alive and one.goes and one.group == number for one in ranks):
                yield f"step {number}", self._stepped(state, number, of)

    def _faults(self, state: Job) -> Iterator[tuple[str, Job]]:
        if self.joins and not state.ranks[2].came:
            yield "c comes", _with(state, 2, came=True)
        if state.drains and state.ranks[0].alive:
            leaves = state._replace(drains=state.drains - 1)
            yield "drain a", _with(leaves, 0, leaving=True)
        if not state.faults:
            return
        for at, rank in enumerate(state.ranks):
            if not rank.alive or not rank.came:
                continue
            hurt = state._replace(faults=state.faults - 1, crashed=True)
            yield f"crash {NAMES[at]}", self._gone(hurt, at)
            if rank.goes:
                # Some of the others have made the step that it was in.
                others = [i for i, one in enumerate(state.ranks) if i != at and one.goes]
                for count in range(1, len(others) + 1):
                    for ahead in combinations(others, count):
                        if all(state.ranks[i].group == rank.group for i in ahead):
                            some = self._stepped(hurt, rank.group, list(ahead))
                            label = f"crash {NAMES[at]}, {len(ahead)} ahead"
                            yield label, self._gone(some, at)

    # -- the sidecars

    def _told(self, name: str, rank: Rank) -> WorldReport | None:
        part = RankInWorld(
            number=rank.number,
            step=rank.step,
            epoch=rank.epoch,
            held=rank.held,
            broken=rank.broken,
            formed=rank.tried if self.boasts and rank.joins else rank.formed,
            failed=(rank.failed, "why") if rank.failed else None,
            ready=rank.ready,
            torch="2.15.0",
        )
        line = RankProgress(0, 1, "", rank.step, True, False, in_world=part)
        # What it was shown before the look at its line.
        report = report_of([line], Seat(name, name, 1), rank.vote_of, rank.report)
        if self.believes and report is not None and report.vote is not None:
            report = replace(report, vote=rank.step)
        return report

    def _snapshot(self, state: Job) -> WorldSnapshot:
        of = dict(zip(NAMES, state.ranks, strict=True))
        return WorldSnapshot(
            state.change,
            7,
            world=state.world,
            members=state.members,
            lost=frozenset(name for name, one in of.items() if not one.alive),
            leaving=frozenset(name for name, one in of.items() if one.leaving),
            newcomers=("c",)
            if state.world and of["c"].came and of["c"].alive and "c" not in state.members
            else (),
            reports={name: one.report for name, one in of.items() if one.report and one.alive},
            sizes=Sizes(self.least, 3),
        )

    def _decided(self, state: Job, now: float) -> Job | None:
        snapshot = self._snapshot(state)
        decision = self.plant(decide(now, 0.0, snapshot, POLICY), snapshot)
        change = decision.change
        if change is None:
            return None
        if decision.action == "form":
            if change.number in [number for number, _ in state.tried]:
                raise Broken(f"world {change.number} is tried again")
            state = state._replace(tried=(*state.tried, (change.number, change.seats)))
        if decision.action == "formed":
            for name in state.change.seats:
                rank = state.ranks[NAMES.index(name)]
                if rank.alive and not rank.broken and rank.group != state.change.number:
                    raise Broken(f"{name} is not in world {state.change.number}, which has formed")
            state = state._replace(world=state.change.number, members=state.change.seats)
        return state._replace(change=change)

    def _released(self, state: Job, name: str, rank: Rank) -> bool:
        if not rank.leaving or not state.world:
            return False
        if self.hurries and state.change.phase == "form":
            return True
        return name not in state.members and state.change.phase != "fall-back"

    def _gone(self, state: Job, at: int) -> Job:
        after = _with(state, at, alive=False, goes=False, joins=False, group=0)
        rank = state.ranks[at]
        if rank.leaving and state.faults == self.faults and not state.crashed:
            holders = [one for one in after.ranks if one.alive and one.formed and one.group]
            if rank.step and max((one.step for one in holders), default=-1) < rank.step:
                raise Broken("the last that has its state is sent away")
        return after

    # -- the ranks

    def _looked(self, name: str, rank: Rank) -> Rank:
        change, world, members = rank.shown
        if rank.goes or rank.joins:
            return rank
        if change.phase == "form" and name in change.seats:
            if change.number > rank.tried:
                return rank._replace(
                    tried=change.number, joins=True, group=0, epoch=change.epoch, held=0
                )
            return rank
        if change.phase == "broken":
            if rank.epoch >= change.epoch:
                return rank
            keep = rank.group > change.number
            group = rank.group if keep else 0
            return rank._replace(epoch=change.epoch, group=group, held=0, broken=0, formed=0)
        if name not in members or not rank.group or rank.group != world:
            return rank
        ahead = rank.step < STEPS
        if change.phase == "train":
            first = rank._replace(number=world, epoch=change.epoch, held=0, ready=False)
            return first._replace(goes=ahead)
        if change.phase == "hold":
            rank = rank._replace(number=world, ready=False)
            if change.step is not None and rank.step < change.step:
                return rank._replace(goes=True, held=0)
            return rank._replace(held=change.epoch, epoch=change.epoch)
        return rank

    def _met(self, state: Job, number: int, of: list[int]) -> Job:
        change = next(c for c in _changes(state) if c.number == number and c.seats)
        source = state.ranks[NAMES.index(change.source)]
        if source.step != change.step:
            raise Broken(f"the source of world {number} is not at step {change.step}")
        most = max(state.ranks[at].step for at in of)
        if source.step < most:
            raise Broken(f"step {most} is lost")
        ranks = list(state.ranks)
        for at in of:
            ranks[at] = ranks[at]._replace(
                joins=False, group=number, formed=number, failed=0, broken=0,
                step=source.step, history=source.history,
            )  # fmt: skip
        return state._replace(ranks=tuple(ranks))

    def _stepped(self, state: Job, number: int, of: list[int]) -> Job:
        if state.world < number:
            raise Broken(f"a step in world {number}, which has not formed")
        states = {(state.ranks[at].step, state.ranks[at].history) for at in of}
        if len(states) > 1:
            raise Broken(f"the ranks of world {number} differ: {sorted(states)}")
        ranks = list(state.ranks)
        for at in of:
            one = ranks[at]
            history = (*one.history, number)
            ranks[at] = one._replace(step=one.step + 1, history=history, goes=False)
        return state._replace(ranks=tuple(ranks))

    def _cannot_go_on(self, state: Job, rank: Rank) -> bool:
        """Whether a collective of it can never end, and it or its watcher has seen that."""
        number = rank.tried if rank.joins else rank.group
        if not (rank.joins or rank.goes):
            return False
        seats = dict(state.tried)[number]
        mates = [state.ranks[NAMES.index(name)] for name in seats]
        if rank.joins:
            return any(not m.alive or m.tried > number or m.failed == number for m in mates)
        return any(not m.alive or m.group != number for m in mates)

    # -- the end

    def check_end(self, state: Job) -> None:
        """All that live train in one world, or changes need a restart."""
        if state.change.phase == "fall-back":
            if not state.crashed:
                raise Broken(f"it falls back for nothing: {state.change.reason}")
            return
        if not state.world and any(one.leaving or not one.alive for one in state.ranks):
            return  # Rounds see to worlds that have not formed.
        here = [NAMES[at] for at, one in enumerate(state.ranks) if one.alive and one.came]
        if state.change.phase != "train":
            raise Broken(f"it stands still in {state.change.phase}: {state.change.reason}")
        for name in here:
            rank = state.ranks[NAMES.index(name)]
            if name not in state.members or rank.group != state.world:
                raise Broken(f"{name} is left out of world {state.world}")
            if rank.step < STEPS:
                raise Broken(f"{name} stands still at step {rank.step}")


def _changes(state: Job) -> Iterator[WorldChange]:
    yield state.change
    for rank in state.ranks:
        yield rank.shown.change
        yield rank.vote_of


def _with(state: Job, at: int, **changes: object) -> Job:
    rank = state.ranks[at]._replace(**changes)  # type: ignore[arg-type]
    return state._replace(ranks=put(state.ranks, at, rank))
