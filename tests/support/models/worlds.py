# SPDX-License-Identifier: Apache-2.0
"""Three pods of one rank each in a world that changes in place, with each send apart.

The decision, the reports, the orders and the rank's answers to them are the product's. What a rank
does, what its sidecar reports, what that shows, and what is decided, are steps of their own. Each
rank ends a collective by itself once all have begun it, so a fault leaves some a step ahead.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import agent.world_report
import rdzv.world
from launcher_shim.c10d.rounds.records import Seat
from muster.world import conduct
from muster.world.conduct import HOLD, Order, WorldRank, parse
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import RankInWorld, RankProgress
from rdzv.records.world import WorldChange, WorldReport
from rdzv.world import WorldPolicy, WorldSnapshot
from tests.support.models.explorer import Broken, put

POLICY = WorldPolicy()
LONG_S = 1e6
NAMES = "abc"
ROUND = 7
TORCH = "2.15.0"

TORN = (-1,) * 9
"""The history of a state that is not whole: of more steps than any rank makes."""

Place = tuple[str, int]
"""A member, and which torchrun of it."""


class Pod(NamedTuple):
    """One pod: its torchrun, its sidecar and its rank.

    ``seat``: which torchrun's request its rank was started for. ``cut``: it has no lease, so that
    it counts as lost and can write nothing. ``shown``: the order in its file. ``asked``: the change
    that its sidecar has shown before it last looked. ``where``: ``at`` a boundary, ``in`` a step,
    which all have begun (``met``), in a form (``forms``), which all have begun (``takes``), before
    a step that broke (``broke``), ``parked``, or in today's changes (``today``). ``line``: what
    the rank has published. ``history``: the world in which its state made each step. ``given``:
    the state that it takes.
    """

    seat: int = 0
    alive: bool = True
    cut: bool = False
    leaving: bool = False
    shown: Order = Order()
    asked: WorldChange = WorldChange()
    where: str = "at"
    rank: WorldRank = WorldRank()
    line: WorldRank = WorldRank()
    history: tuple[int, ...] = ()
    given: tuple[int, tuple[int, ...]] = (-1, ())
    report: WorldReport | None = None


class Job(NamedTuple):
    """All of them, and the store. ``tried``: the seats of each world that ranks were to form.

    ``faults``: what may still happen. ``spoiled``: whether anything but a drain or a join did.
    ``kept``: the steps of the state that all of the present world have said to have formed with.
    """

    change: WorldChange
    world: int
    members: tuple[Place, ...]
    pods: tuple[Pod, ...]
    faults: tuple[str, ...]
    tried: tuple[tuple[int, tuple[Place, ...]], ...] = ()
    spoiled: bool = False
    kept: int = 0
    paused: bool = False
    away: bool = False
    ends: bool = False


def lets_go(job: Job, place: Place) -> bool:
    """Return whether the present world has formed without a pod, as drains see it."""
    return place not in job.members


@dataclass
class Worlds:
    """The model: ``pods`` of three are in the first world, and the others may come.

    ``faults``: what may happen, each once: ``join``, ``drain a``, ``cancel a``, ``crash``,
    ``worker`` (a worker dies, and its torchrun lives), ``cut`` (a lease ends, and all live),
    ``glitch`` (a collective fails, and all live), ``half`` (it fails amid the optimizer's step),
    ``restart`` (of a sidecar), ``away`` (the store), ``late`` (a timeout), ``pause``. ``steps``:
    how many steps are made before all stay at a boundary. ``begins``: whether it begins before the
    first world, and not in it. ``least``: the job's ``min``.
    """

    faults: tuple[str, ...] = ()
    pods: int = 2
    steps: int = 2
    begins: bool = False
    least: int = 1
    rare: float = field(default=0.15, init=False)

    def __post_init__(self) -> None:
        self._decided: dict[Hashable, Any] = {}
        self._reported: dict[Hashable, Any] = {}
        self._orders: dict[Hashable, Order] = {}

    def start(self) -> Job:
        """The ranks of the first pods have come; or they train, all at step 1."""
        members = tuple((name, 1) for name in NAMES[: self.pods])
        if self.begins:
            change, world = WorldChange(round=ROUND), 0
            waits = WorldRank(ready=True)
            pods = [Pod(1, asked=change, rank=waits, line=waits) for _ in members]
        else:
            change, world = WorldChange(5, "train", ROUND, 1), 1
            rank = WorldRank(number=1, step=1, epoch=5, formed=1, grouped=True, tried=1)
            pods = [
                Pod(1, asked=change, rank=rank, line=rank, history=(1,)) for _ in members
            ]  # fmt: skip
        absent = [Pod(alive=False) for _ in NAMES[self.pods :]]
        tried = ((1, members),) if world else ()
        job = Job(change, world, members, (*pods, *absent), tuple(sorted(self.faults)), tried)
        for at, (name, _) in enumerate(members):
            shown = self._order(job, name, job.pods[at])
            report = self._report(name, job.pods[at])
            job = _with(job, at, shown=shown, report=report)
        return job

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
        """What goes on; what time alone brings, once nothing does; and the faults."""
        going = list(self._going_on(state))
        if not going and state.away:
            going = [("the store is back", state._replace(away=False))]
        if not going:
            going = list(self._in_time(state))
        return going, self._faults(state)

    def _going_on(self, state: Job) -> Iterator[tuple[str, Job]]:
        if (decided := self._decide(state, 0.0)) is not None:
            yield "decide", decided
        for at, pod in enumerate(state.pods):
            name = NAMES[at]
            if not pod.alive:
                continue
            order = self._order(state, name, pod)
            if not state.away and (order != pod.shown or pod.asked != state.change):
                yield f"show {name}", _with(state, at, shown=order, asked=state.change)
            if not state.away and not pod.cut:
                report = self._report(name, pod)
                if report != pod.report:
                    yield f"tell {name}", _with(state, at, report=report)
            yield from self._train(state, at, pod)
            if pod.cut and not state.away:
                yield f"{name} is back", _with(state, at, cut=False)
            elif self._may_go(state, at):
                yield f"release {name}", self._released(state, at)
            elif self._asks_again(state, at):
                yield f"{name} asks again", _another(state, at)

    def _train(self, state: Job, at: int, pod: Pod) -> Iterator[tuple[str, Job]]:
        name, rank = NAMES[at], pod.rank
        if pod.where == "at":
            looked = self._look(state, at, pod)
            if looked != state:
                yield f"look {name}", looked
        elif pod.where == "met":
            yield f"step {name}", self._stepped(state, at)
        elif pod.where == "takes":
            formed = conduct.has_formed(rank, Order(number=rank.tried), pod.given[0])
            yield (
                f"formed {name}",
                _with(state, at, where="at", rank=formed, line=formed, history=pod.given[1]),
            )
        elif pod.where == "broke" and conduct.confirms_loss(pod.shown, rank):
            back = conduct.arrive(rank, rank.step)
            yield f"goes on {name}", _with(state, at, where="at", rank=back, line=back)
        if pod.where in ("in", "met") and self._cannot_end(state, at):
            yield f"breaks {name}", _breaks(state, at)
        if pod.where in ("forms", "takes") and self._cannot_form(state, at):
            yield f"cannot form {name}", _cannot_form(state, at)

    def _in_time(self, state: Job) -> Iterator[tuple[str, Job]]:
        if (decided := self._decide(state, LONG_S)) is not None:
            yield "time", decided
        for at, pod in enumerate(state.pods):
            if pod.alive and pod.where in ("forms", "takes"):
                yield f"too late {NAMES[at]}", _cannot_form(state, at)
            elif pod.alive and pod.where == "broke":
                yield (
                    f"the script of {NAMES[at]} raises",
                    _another(state._replace(spoiled=True), at),
                )

    def _faults(self, state: Job) -> Iterator[tuple[str, Job]]:
        for index, fault in enumerate(state.faults):
            if index and state.faults[index - 1] == fault:
                continue
            rest = state._replace(faults=state.faults[:index] + state.faults[index + 1 :])
            yield from self._fault(fault, rest)

    def _fault(self, fault: str, state: Job) -> Iterator[tuple[str, Job]]:
        kind, _, whose = fault.partition(" ")
        spoiled = state._replace(spoiled=True)
        if kind == "join":
            at = next(at for at, pod in enumerate(state.pods) if not pod.seat)
            yield f"{NAMES[at]} comes", _another(state, at)
        elif kind == "away" and not state.away:
            yield "the store is away", state._replace(away=True)
        elif kind == "pause":
            yield "pause", state._replace(paused=True)
        elif kind == "late" and (late := self._decide(spoiled, LONG_S)) is not None:
            yield "a timeout", late
        for at, pod in enumerate(state.pods):
            name = NAMES[at]
            if not pod.alive or (whose and whose != name):
                continue
            if kind == "drain" and not pod.leaving:
                yield fault, _with(state, at, leaving=True)
            elif kind == "cancel" and pod.leaving:
                yield fault, _with(state, at, leaving=False)
            elif kind == "crash":
                yield f"crash {name}", _gone(spoiled, at)
            elif kind == "worker":
                yield f"the worker of {name} dies", _another(spoiled, at)
            elif kind == "cut" and not pod.cut:
                yield f"cut {name}", _with(spoiled, at, cut=True, report=None)
            elif kind in ("glitch", "half") and pod.where in ("in", "met"):
                yield f"{kind} {name}", _breaks(spoiled, at, half=kind == "half")
            elif kind == "restart":
                yield f"restart {name}", _with(state, at, asked=WorldChange())

    # -- the sidecars

    def _order(self, state: Job, name: str, pod: Pod) -> Order:
        own = self._is_in_own_round(name, pod)
        key = (state.change, state.members, name, own, pod.line.number > 0)
        if (order := self._orders.get(key)) is None:
            content = agent.world_report.shown(
                state.change,
                0 if state.change.phase == "fall-back" else state.world,
                [member for member, _ in state.members],
                name,
                was_in=pod.line.number > 0,
                own_round=own,
                closed=False,
                store="127.0.0.1:1",
                root="/",
            )
            order = self._orders[key] = parse(content)
        return order

    def _is_in_own_round(self, name: str, pod: Pod) -> bool:
        return pod.seat > 1 or name not in NAMES[: self.pods]

    def _report(self, name: str, pod: Pod) -> WorldReport | None:
        key = (name, pod.seat, pod.line, pod.asked, pod.report)
        if key not in self._reported:
            line = RankProgress(0, 1, "", pod.line.step, True, False, in_world=_part(pod.line))
            seat = Seat(name, "n", pod.seat)
            self._reported[key] = agent.world_report.report_of([line], seat, pod.asked, pod.report)
        return self._reported[key]  # type: ignore[no-any-return]

    def _decide(self, state: Job, now: float) -> Job | None:
        if state.away or state.ends:
            return None
        of = dict(zip(NAMES, state.pods, strict=True))
        reports = tuple(
            (name, pod.report)
            for name, pod in of.items()
            if pod.report is not None and pod.alive and pod.report.seat == f"n.{pod.seat}"
        )
        lost = frozenset(
            name
            for name, pod in of.items()
            if pod.seat and (not pod.alive or pod.cut or self._is_replaced(state, name, pod))
        )
        leaving = frozenset(name for name, pod in of.items() if pod.alive and pod.leaving)
        newcomers = tuple(
            name
            for name, pod in of.items()
            if state.world and pod.alive and not pod.cut and (name, pod.seat) not in state.members
        )
        key = (now, state.change, state.world, state.members, reports, lost, leaving, newcomers)
        decision = self._decided.get((*key, state.paused))
        if decision is None:
            snapshot = WorldSnapshot(
                state.change,
                ROUND,
                world=0 if state.change.phase == "fall-back" else state.world,
                members=tuple(name for name, _ in state.members),
                lost=lost,
                leaving=leaving,
                newcomers=newcomers,
                reports=dict(reports),
                reforms="the job is paused" if state.paused else "",
                sizes=JobPolicy(self.least, 3),
            )
            decision = rdzv.world.decide(now, 0.0, snapshot, POLICY)
            self._decided[(*key, state.paused)] = decision
        change = decision.change
        if change is None:
            return None
        if decision.action == "form":
            if change.number in [number for number, _ in state.tried]:
                raise Broken(f"world {change.number} is tried again")
            for name in change.seats:
                ahead = of[name].rank.step > (change.step or 0)
                if ahead and name in [member for member, _ in state.members]:
                    raise Broken(f"I13: step {of[name].rank.step} of {name} is lost")
            places = tuple((name, of[name].seat) for name in change.seats)
            state = state._replace(tried=(*state.tried, (change.number, places)))
        elif decision.action == "formed":
            state = self._formed(state)
        elif decision.action == "fall back":
            state = state._replace(ends=not decision.whole)
        return state._replace(change=change)

    @staticmethod
    def _is_replaced(state: Job, name: str, pod: Pod) -> bool:
        return any(member == name and seat != pod.seat for member, seat in state.members)

    def _formed(self, state: Job) -> Job:
        number, places = state.tried[-1]
        kept = []
        for name, seat in places:
            pod = state.pods[NAMES.index(name)]
            if not pod.alive or pod.seat != seat or pod.rank.broken == number:
                continue
            if pod.rank.formed != number or not pod.rank.grouped:
                raise Broken(f"{name} is not in world {number}, which has formed")
            kept.append(pod.history)
        if len(set(kept)) > 1:
            raise Broken(f"I13: world {number} has formed with different states: {kept}")
        return state._replace(
            world=number, members=places, kept=max(map(len, kept), default=state.kept)
        )

    def _may_go(self, state: Job, at: int) -> bool:
        """Whether the sidecars say that the world goes on without a pod that leaves."""
        pod = state.pods[at]
        goes_on = bool(state.world) and not state.ends and state.change.phase != "fall-back"
        return pod.leaving and goes_on and lets_go(state, (NAMES[at], pod.seat))

    def _released(self, state: Job, at: int) -> Job:
        pod = state.pods[at]
        trained = pod.rank.number >= 0  # One that has taken a state has no more than its source.
        if trained and not state.spoiled and len(pod.history) > state.kept:
            raise Broken(f"I7: {NAMES[at]} is sent away, and no other has said to hold its state")
        return _gone(state, at)

    def _asks_again(self, state: Job, at: int) -> bool:
        """Whether its torchrun is shown that the world has left it behind, and asks once more."""
        pod = state.pods[at]
        outside = (NAMES[at], pod.seat) not in state.members
        left = outside and (pod.line.number > 0 or not self._is_in_own_round(NAMES[at], pod))
        return left and not pod.leaving and bool(state.world) and not state.away

    # -- the ranks

    def _look(self, state: Job, at: int, pod: Pod) -> Job:
        verdict, rank = conduct.decide(pod.rank, pod.shown)
        if verdict == conduct.GO:
            asked = pod.shown.phase == HOLD and pod.shown.step is not None
            if rank.step >= self.steps and not asked:
                return state  # All of it was made.
            return self._begun(_with(state, at, rank=rank, where="in"), at)
        if verdict == conduct.JOIN:
            own = sum(1 for name, _ in state.tried[-1][1][: pod.shown.first_rank] if name)
            begun = conduct.begin_form(rank, pod.shown, own)
            return self._meet(_with(state, at, rank=begun, where="forms"), begun.tried)
        if verdict == conduct.BREAK:
            rank = rank._replace(grouped=False)
        if verdict == conduct.PARK:
            rank = rank._replace(grouped=False)
            return _with(state, at, rank=rank, line=rank, where="parked")
        if verdict == conduct.TODAY:
            return _with(state, at, rank=rank, where="today")
        if rank == pod.rank:
            return state
        published = pod.line if verdict == conduct.WAIT else rank
        return _with(state, at, rank=rank, line=published)

    def _begun(self, state: Job, at: int) -> Job:
        """Begin a step; the last to do so finds all in it."""
        number = state.pods[at].rank.formed
        of = [NAMES.index(name) for name, _ in dict(state.tried)[number]]
        ranks = [state.pods[one] for one in of]
        if not all(one.where == "in" and one.rank.formed == number for one in ranks):
            return state
        if state.world != number:
            raise Broken(f"I13: a step in world {number}, and {state.world} has formed")
        states = {(one.rank.step, one.history) for one in ranks}
        if len(states) > 1:
            raise Broken(f"I13: the ranks of world {number} differ: {sorted(states)}")
        for one in of:
            state = _with(state, one, where="met")
        return state

    def _stepped(self, state: Job, at: int) -> Job:
        pod = state.pods[at]
        rank = conduct.arrive(pod.rank, pod.rank.step + 1)
        history = (*pod.history, rank.formed)
        return _with(state, at, rank=rank, line=rank, where="at", history=history)

    def _meet(self, state: Job, number: int) -> Job:
        """Wait for the others of a world; the last to come finds all there."""
        of = [NAMES.index(name) for name, _ in dict(state.tried)[number]]
        ranks = [state.pods[one] for one in of]
        if not all(one.where == "forms" and one.rank.tried == number for one in ranks):
            return state
        order = ranks[0].shown
        source = ranks[order.source]
        if source.rank.step < 0 or source.rank.step != len(source.history):
            raise Broken(f"I13: the source of world {number} holds no whole state")
        given = (source.rank.step, source.history)
        for one in of:
            pod = state.pods[one]
            # From now on until it has formed, a rank that is behind holds a part of each state.
            kept = pod.history if pod.history == source.history else TORN
            state = _with(state, one, where="takes", given=given, history=kept)
        return state

    def _cannot_end(self, state: Job, at: int) -> bool:
        """Whether its collective can never end, or its watcher has cut it."""
        pod = state.pods[at]
        number = pod.rank.formed
        if conduct.is_lost(pod.shown, number):
            return True
        return any(
            not one.alive or one.seat != seat or not one.rank.grouped or one.rank.formed != number
            for one, seat in _mates(state, number)
        )

    def _cannot_form(self, state: Job, at: int) -> bool:
        pod = state.pods[at]
        number = pod.rank.tried
        if conduct.is_given_up(pod.shown, number):
            return True
        failed = (number, "why")
        return any(
            not one.alive or one.seat != seat or one.rank.tried > number
            or one.rank.failed == failed or (one.where == "at" and one.rank.tried == number
                and not one.rank.grouped)
            for one, seat in _mates(state, number)
        )  # fmt: skip

    # -- the end

    def check_end(self, state: Job) -> None:
        """All that live train in one world, or changes need a restart, which all come to."""
        if state.ends:
            if not state.spoiled:
                raise Broken(f"it ends for nothing: {state.change.reason}")
            return
        alive = [(name, pod) for name, pod in zip(NAMES, state.pods, strict=True) if pod.alive]
        if state.change.phase == "fall-back":
            asked = state.paused or "may not leave" in state.change.reason
            if not (state.spoiled or asked):
                raise Broken(f"I11: it falls back for nothing: {state.change.reason}")
            of = [pod for name, pod in alive if _is_in(state, name)]
            # Of a world that is not whole the rest forms again; so do those whose peers are parked.
            if len(of) == len(state.members) and all(pod.where == "parked" for pod in of):
                raise Broken(f"I11: all stand still as it falls back: {state.change.reason}")
            return
        if not state.world and (state.spoiled or any(pod.leaving for _, pod in alive)):
            return  # Rounds see to worlds that have not formed.
        if state.change.phase != "train":
            raise Broken(f"I11: it stands still in {state.change.phase}: {state.change.reason}")
        for name, pod in alive:
            if not _is_in(state, name) or pod.rank.formed != state.world or not pod.rank.grouped:
                raise Broken(f"I11: {name} is left out of world {state.world}")
            if pod.rank.step < self.steps:
                raise Broken(f"I11: {name} stands still at step {pod.rank.step}")


def _is_in(state: Job, name: str) -> bool:
    return (name, state.pods[NAMES.index(name)].seat) in state.members


def _mates(state: Job, number: int) -> Iterator[tuple[Pod, int]]:
    for name, seat in dict(state.tried)[number]:
        yield state.pods[NAMES.index(name)], seat


def _breaks(state: Job, at: int, *, half: bool = False) -> Job:
    """Its collective fails; it leaves its group, and waits until the sidecar confirms the loss."""
    pod = state.pods[at]
    rank = conduct.break_off(pod.rank, -1 if half else pod.rank.step)._replace(grouped=False)
    history = TORN if half else pod.history
    return _with(state, at, where="broke", rank=rank, line=rank, history=history)


def _cannot_form(state: Job, at: int) -> Job:
    rank = state.pods[at].rank
    rank = rank._replace(failed=(rank.tried, "why"))
    return _with(state, at, where="at", rank=rank, line=rank)


def _gone(state: Job, at: int) -> Job:
    return _with(state, at, alive=False, cut=False, report=None)


def _another(state: Job, at: int) -> Job:
    """Another torchrun's rank comes: it imports, loads a checkpoint, and waits to be taken in."""
    fresh, former = WorldRank(ready=True), state.pods[at]
    shown = former.shown if former.seat else Order()
    asked = former.asked if former.seat else WorldChange(round=ROUND)
    pod = Pod(former.seat + 1, leaving=former.leaving, shown=shown, asked=asked, rank=fresh,
              line=fresh)  # fmt: skip
    return state._replace(pods=put(state.pods, at, pod))


def _part(rank: WorldRank) -> RankInWorld:
    """What the sidecar reads of it."""
    fields = json.loads(rank.told(TORCH))
    failed = fields.pop("failed", None)
    return RankInWorld(**fields, failed=None if failed is None else (failed[0], failed[1]))


def _with(state: Job, at: int, **changes: Any) -> Job:
    return state._replace(pods=put(state.pods, at, state.pods[at]._replace(**changes)))
