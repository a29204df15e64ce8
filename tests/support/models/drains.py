# SPDX-License-Identifier: Apache-2.0
"""A small world of pods that drain, join, save and fail, to be explored step by step.

What ranks, gates and the store decide are the real pure functions. What is modelled is what lies
around them: ranks that train and save, mirrors that lag, requests under way, sidecars that crash
and start again, cuts, rounds that end and form again. Each step is one atomic change, and any order
of steps may happen. A timer may run out at any moment (one of ``hurry``), and does so for nothing
once nothing else can happen.

A state is a tuple of small numbers, each the name of an immutable part; what the real functions
make of these parts is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Any, Literal, NamedTuple

from launcher_shim.c10d.rounds import inputs
from muster import boundary
from rdzv.drain import decision as draining
from rdzv.drain import gate, transactions
from rdzv.drain.gate import WAITS, Gate, Here, Move
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy, LiveRound
from rdzv.drain.saves import DIFFER
from rdzv.drain.transactions import vote_transaction
from rdzv.keys import JobKeys
from rdzv.records.drain import Commit, Drain, LastCommit, Vote
from rdzv.records.job import Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import RankProgress
from rdzv.snapshot import Listing, Snapshot, listing_of
from rdzv.store import Compare, Delete, KeyValue, Operation, Put
from tests.support.models.explorer import Broken, put

NOW = 1e6
LONG = 1e5
TOOK_S = 5.0
RUN = "r"
HOLDS_BELOW_MIN = DrainPolicy()
KEYS = JobKeys("team", "digits")
GENERATION = KEYS.in_generation(1)
ROUND_KEY = GENERATION.run(RUN).round

Fault = Literal["crash", "cut", "full", "rank", "fail", "lose", "vanish", "stuck", "stay"]
"""``full``: the store is read, and takes no writes until an operator mends it. ``stuck``: a save
never returns. Nobody ends that where no deadline asks for it. ``stay``: a rank never enters its
next loop."""
FAULTS: tuple[Fault, ...] = ("crash", "cut", "full", "rank", "fail", "lose", "vanish")


@dataclass(frozen=True)
class Rules:
    """The size of the job, and what may happen to it.

    ``members`` form the first round, later pods join. ``notices``: who may be drained.
    ``stride``: a boundary every so many steps; the training ends after ``boundaries`` of them.
    ``strides``: of each pod, where a user made them differ.
    ``faults``: kinds, of which ``fault_count`` happen; ``hurry``: timers that run out early.
    ``lockstep``: a rank waits in its next collective for all others. ``begun``: the first round has
    begun, and all have heard of it. ``deadlines``: a drain has one. ``outsider``: a pod whose
    ranks take no part in drains. ``preempted``: pods that make room for others. ``block``: after
    so many boundaries a rank leaves its training loop, evaluates, and enters the next one; 0: there
    is one loop. ``cursors``: what each rank gives with a save as where the data go on; none of them
    without.
    """

    members: int = 2
    joiners: int = 0
    ranks: int = 1
    stride: int = 1
    strides: tuple[int, ...] = ()
    boundaries: int = 3
    least: int = 1
    most: int = 4
    notices: tuple[int, ...] = (0,)
    cancels: int = 0
    faults: tuple[Fault, ...] = FAULTS
    fault_count: int = 0
    hurry: int = 0
    lockstep: bool = True
    begun: bool = True
    deadlines: bool = True
    outsider: int | None = None
    preempted: tuple[int, ...] = ()
    block: int = 0
    cursors: tuple[str, ...] = ()
    policy: DrainPolicy = HOLDS_BELOW_MIN

    @property
    def pods(self) -> range:
        return range(self.members + self.joiners)


NodeState = Literal["none", "in", "asking", "stopped", "left", "done", "gone"]
"""Of a pod's torchrun. ``stopped``: it drains and has left the round. ``left``: it failed in the
round. ``gone``: the pod is. ``done``: its ranks have finished."""


class Store(NamedTuple):
    """What lies in the store. ``nodes`` are the pods' own keys."""

    number: int
    complete: bool
    finishing: bool
    closed: bool
    members: tuple[int, ...]
    nodes: tuple[NodeState, ...]
    commit: Commit | None
    votes: tuple[Vote | None, ...]
    drains: tuple[Drain | None, ...]
    last: LastCommit | None

    @property
    def round_key(self) -> tuple[object, ...]:
        return self[:5]


class Request(NamedTuple):
    """A vote or an acknowledgement under way."""

    vote: Vote
    recorded: Vote | None
    commit: Commit | None
    drain: tuple[Drain | None] | None
    """What it requires of the pod's drain, if anything."""


class Side(NamedTuple):
    """One sidecar, and what lies in its run directory.

    ``late``: the store has answered no write of it for long, while ranks wait.
    """

    up: bool
    cut: bool
    mirror: int
    shown: Gate | None
    late: bool
    request: Request | None
    early: tuple[RankProgress, ...] | None = None


At = Literal[
    "none", "start", "enter", "publish", "read", "save", "stuck", "leave", "away", "train", "end"
]


PAST: tuple[At, ...] = ("leave", "away", "enter", "train", "end")
"""Where a rank is that has left its boundary."""


class Trainer(NamedTuple):
    """One rank. ``told``, ``away``: what its file says. ``saved``: on disk, by epoch."""

    at: At
    rank: boundary.Rank
    told: boundary.Rank | None
    saved: tuple[int, int] | None = None
    away: bool = False
    read_early: boundary.RankGate | None = None


class Env(NamedTuple):
    """``due``: of each pod's deadline, 1 is its last chance. ``cancelled`` is a ghost.

    ``full``: the store takes no writes.
    """

    due: tuple[int, ...]
    to_notice: tuple[int, ...]
    to_join: tuple[int, ...]
    to_cancel: int
    faults: int
    hurry: int
    cancelled: frozenset[int]
    base: int
    full: bool = False


State = tuple[int, ...]
Step = tuple[str, State]
ABSENT = Trainer("none", boundary.Rank(""), None)


OTHERS_STILL_SAVE = (
    *("rank 0 at 0 goes", "rank 1 at 0 goes", "notice for 0", "0 hears", "0 writes hold"),
    *("0 hears", "0 shows hold", "0 sends", "the request of 0 lands", "rank 0 arrives"),
    *("1 hears", "1 shows hold", "1 sends", "the request of 1 lands", "0 hears"),
    *("0 writes commit", "0 hears", "0 shows commit", "rank 0 at 1 reads: save"),
    *("rank 0 at 1 saves", "0 sends", "the request of 0 lands"),
)
"""The pod that drains has saved, which is on record; the other has not come to its boundary yet."""
OUT_OF_TIME = (*OTHERS_STILL_SAVE, *("(early) the deadline of 0 comes nearer",) * 2)
"""And its deadline has come since."""


ALL_THREE_SAVE = (
    *("notice for 0", "rank 2 at 0 goes", "1 hears", "2 hears", "1 writes hold", "1 hears"),
    *("1 shows hold", "1 sends", "the request of 1 lands", "1 hears", "2 hears"),
    *("0 hears", "2 shows hold", "2 sends", "the request of 2 lands", "1 hears"),
    *("rank 0 at 0 goes", "2 hears", "0 hears", "0 shows hold", "0 sends"),
    *("the request of 0 lands", "1 hears", "1 writes commit", "2 hears", "2 shows commit"),
    *("1 hears", "1 shows commit", "rank 1 at 0 goes", "0 hears", "0 shows commit"),
    *("rank 2 arrives", "rank 1 arrives", "rank 2 at 1 reads: save", "rank 1 at 1 reads: save"),
)
"""All of three pods are told to save, and none has."""


def uid(pod: int) -> str:
    return f"uid-{pod}"


def name(pod: int) -> str:
    return f"w-{pod}"


def token(number: int) -> str:
    return f"master-{number}"


def rank_gate(shown: Gate) -> boundary.RankGate:
    return boundary.RankGate(shown.epoch, shown.master, shown.phase, shown.step, shown.cut)


def gave_up(trainer: Trainer, epoch: int) -> bool:
    """Whether a rank's file says that it does not wait for this epoch any more."""
    failed = trainer.told and trainer.told.failed
    return failed is not None and failed[0] == epoch


class Names:
    """Gives each immutable part a small number."""

    def __init__(self) -> None:
        self.number: dict[Any, int] = {}
        self.part: list[Any] = []

    def of(self, part: Any) -> int:
        found = self.number.get(part)
        if found is None:
            found = self.number[part] = len(self.part)
            self.part.append(part)
        return found


class World:
    """Every step of one set of rules. The attributes below are what a mutation replaces."""

    rare = 0.08
    boundary_decide = staticmethod(boundary.decide)
    gate_local = staticmethod(gate.local)
    draining_decide = staticmethod(draining.decide)
    transaction = staticmethod(transactions.transaction)
    vote_transaction = staticmethod(vote_transaction)
    cancel = staticmethod(transactions.cancel)
    ends_round = staticmethod(inputs.ends_round)
    savers = staticmethod(draining.savers)
    joins_wait = staticmethod(inputs.joins_wait)
    listing_decide = staticmethod(listing_of)
    entering_forgets = False
    gate_before_publishing = False
    gate_read_again = True
    leavers_are_excused = True
    progress_before_gate = False
    gate_cleared_at_start = False
    failed_forgotten_at_start = False
    waits_to_begin = True

    def __init__(self, rules: Rules, **mutation: Any) -> None:
        for attribute, value in mutation.items():
            assert hasattr(self, attribute), attribute
            setattr(self, attribute, value)
        self.pace: list[float] = []
        self.rules = rules
        self.pods = list(rules.pods)
        self.names = Names()
        self.cache: dict[Any, Any] = {}
        self.side_at = 2
        self.rank_at = 2 + len(self.pods)
        self.ranks_of = {
            pod: range(self.rank_at + pod * rules.ranks, self.rank_at + (pod + 1) * rules.ranks)
            for pod in self.pods
        }
        self.end_step = rules.boundaries * rules.stride

    # --- parts ---

    def start(self) -> State:
        rules, of = self.rules, self.names.of
        count = len(self.pods)
        nodes: list[NodeState] = ["asking"] * rules.members
        nodes += ["none"] * rules.joiners
        store = Store(
            0, False, False, False, (), tuple(nodes), None, (None,) * count, (None,) * count, None
        )
        first = of(store)
        side = Side(True, False, first, None, False, None)
        env = Env(
            (0,) * count,
            rules.notices,
            tuple(range(rules.members, count)),
            rules.cancels,
            rules.fault_count,
            rules.hurry,
            frozenset(),
            0,
        )
        trainers = (of(ABSENT),) * (count * rules.ranks)
        state: State = (first, of(env), *(of(side),) * count, *trainers)
        while rules.begun and not all(self.at_work(state, pod) for pod in range(rules.members)):
            steps = list(self.progress_steps(state))
            _, state = next(step for step in steps if not step[0].endswith("goes"))
        return state

    def at_work(self, state: State, pod: int) -> bool:
        return all(self.names.part[state[where]].at == "enter" for where in self.ranks_of[pod])

    def cached(self, function: Callable[..., Any], *key: Any) -> Any:
        whole = (function.__name__, *key)
        try:
            return self.cache[whole]
        except KeyError:
            result = self.cache[whole] = function(*key)
            return result

    def membership(self, store: Store) -> tuple[Snapshot, Listing]:
        found: tuple[Snapshot, Listing] = self.cached(self._membership, store)
        return found

    def _membership(self, store: Store) -> tuple[Snapshot, Listing]:
        members = {
            name(pod): Member(
                name(pod),
                uid(pod),
                pod + 1,
                "10.0.0.1",
                "host",
                "worker",
                self.rules.ranks,
                self.rules.least,
                self.rules.most,
            )
            for pod in self.pods
            if store.nodes[pod] not in ("none", "gone")
        }
        job = Job(JobPolicy(self.rules.least, self.rules.most), mod_revision=1)
        drains = {drain.pod_uid: drain for drain in store.drains if drain}
        snapshot = Snapshot(
            1, job, members, {}, drains, commit=store.commit, last_commit=store.last
        )
        return snapshot, self.listing_decide(snapshot)

    def listed(self, store: Store) -> list[int]:
        found: list[int] = self.cached(self._listed, store)
        return found

    def _listed(self, store: Store) -> list[int]:
        names = {member.name for member in self.membership(store)[1].listed}
        return [pod for pod in self.pods if name(pod) in names]

    def live_round(self, store: Store) -> LiveRound:
        found: LiveRound = self.cached(self._live_round, store)
        return found

    def _live_round(self, store: Store) -> LiveRound:
        listed = self.listed(store)
        return LiveRound(
            RUN,
            store.number,
            store.complete,
            tuple(map(name, store.members)),
            frozenset(
                name(pod)
                for pod in store.members
                if store.nodes[pod] != "in" and store.nodes[pod] != "done"
            ),
            reforms="join" if self.has_newcomers(store, listed) else "",
            finishing=store.finishing,
            closed=store.closed,
            master=token(store.number),
            mod_revision=1,
            asking=frozenset(name(pod) for pod in listed if store.nodes[pod] == "asking"),
        )

    def has_newcomers(self, store: Store, listed: list[int]) -> bool:
        """Whether somebody asks to join the present world, and it has room."""
        room = store.complete and len(store.members) < self.rules.most
        asks = (store.nodes[pod] == "asking" and pod not in store.members for pod in listed)
        return room and any(asks)

    def scene(self, mirror: int, pod: int) -> DrainingSnapshot:
        store: Store = self.names.part[mirror]
        snapshot, listed = self.membership(store)
        return DrainingSnapshot(
            snapshot,
            listed,
            self.live_round(store),
            self.votes(store),
            uid(pod),
            revision=snapshot.revision,
        )

    def votes(self, store: Store) -> dict[str, Vote]:
        return {
            name(pod): vote
            for pod, vote in enumerate(store.votes)
            if vote and store.commit and vote.epoch == store.commit.epoch
        }

    # --- what a sidecar decides on the store ---

    def decided(
        self, mirror: int, pod: int, elapsed: bool, due: tuple[int, ...]
    ) -> tuple[str, list[Compare], list[Operation]] | None:
        scene = self.scene(mirror, pod)
        since = NOW - LONG if elapsed else NOW
        far = {0: NOW + LONG, 1: NOW + TOOK_S, 2: since - 1}
        seen = DrainObservations(
            scene.commit.epoch,
            scene.commit.phase,
            since,
            NOW - TOOK_S,
            {uid(other): far[due[other]] for other in self.pods},
        )
        decision = self.draining_decide(NOW, scene, seen, self.rules.policy)
        if decision.commit is None and not decision.drains:
            return None
        phase = decision.commit.phase if decision.commit else "drains"
        return (f"{pod} writes {phase}", *self.transaction(KEYS, scene, decision))

    def applied(
        self, at: int, mirror: int, pod: int, elapsed: bool, due: tuple[int, ...]
    ) -> tuple[str, int] | None:
        """Carry a decision out that was made on ``mirror``, where its compares hold."""
        decided = self.cached(self.decided, mirror, pod, elapsed, due)
        if decided is None:
            return None
        label, compares, operations = decided
        store, seen = self.names.part[at], self.names.part[mirror]
        if not all(self.holds(store, seen, compare) for compare in compares):
            return None
        after = self.written(store, operations)
        return None if after == store else (label, self.names.of(after))

    def holds(self, store: Store, seen: Store, compare: Compare) -> bool:
        """Whether what ``compare`` speaks of is as it was ``seen``."""
        if compare.key == GENERATION.commit:
            return store.commit == seen.commit
        if compare.key == ROUND_KEY:
            return store.round_key == seen.round_key
        if compare.key == GENERATION.drains and compare.prefix:
            return all(
                now is None or now == then
                for now, then in zip(store.drains, seen.drains, strict=True)
            )
        if compare.key == GENERATION.members:
            come = self.membership(store)[0].members.keys()
            return come <= self.membership(seen)[0].members.keys()
        for pod in self.pods:
            if compare.key == GENERATION.drain(uid(pod)):
                return store.drains[pod] == seen.drains[pod]
            if seen.commit and compare.key == GENERATION.vote(seen.commit.epoch, name(pod)):
                return store.votes[pod] == seen.votes[pod]
            if compare.key == GENERATION.member(name(pod)):
                return name(pod) in self.membership(store)[0].members
        assert compare.key == KEYS.job, compare
        return True

    def written(self, store: Store, operations: list[Operation]) -> Store:
        for operation in operations:
            if isinstance(operation, Delete) and operation.key == GENERATION.votes:
                store = store._replace(votes=(None,) * len(store.votes))
                continue
            assert isinstance(operation, Delete | Put), operation
            value = operation.value if isinstance(operation, Put) else b""
            kv = KeyValue(operation.key, value, 1, 1, 1, 0)
            if operation.key == GENERATION.commit:
                store = store._replace(commit=replace(Commit.from_kv(kv), reason=""))
            elif operation.key == KEYS.last_commit:
                store = store._replace(last=LastCommit.from_kv(kv))
            else:
                pod = [GENERATION.drain(uid(p)) for p in self.pods].index(operation.key)
                drain = Drain.from_kv(kv) if value else None
                store = store._replace(drains=put(store.drains, pod, drain))
        return store

    # --- what a sidecar does for its ranks ---

    def cursor(self, rank: int) -> str:
        return self.rules.cursors[rank] if self.rules.cursors else ""

    def progress(self, pod: int, trainers: tuple[int, ...]) -> tuple[RankProgress, ...]:
        files = []
        for local_rank, number in enumerate(trainers):
            trainer: Trainer = self.names.part[number]
            if (told := trainer.told) is not None:
                takes_part = pod != self.rules.outsider and not trainer.away
                cursor = self.cursor(pod * self.rules.ranks + local_rank)
                files.append(
                    RankProgress(
                        local_rank,
                        self.rules.ranks,
                        told.master,
                        told.step,
                        takes_part,
                        told.held,
                        acked=told.acked,
                        failed=told.failed,
                        away=trainer.away,
                        saved=(told.acked[1],) if told.acked and cursor else (),
                        rank=pod * self.rules.ranks + local_rank,
                        cursors=(cursor,) if told.acked and cursor else (),
                    )
                )
        return tuple(files)

    def moved(self, pod: int, number: int, trainers: tuple[int, ...]) -> tuple[str, int] | None:
        side: Side = self.names.part[number]
        if side.mirror < 0:
            store, commit, live, drain, vote, last = None, None, None, None, None, None
        else:
            store = self.names.part[side.mirror]
            live, commit = self.live_round(store), store.commit
            drain, last, vote = store.drains[pod], store.last, store.votes[pod]
            if commit is None or vote is None or vote.epoch != commit.epoch:
                vote = None
        ranks = self.progress(pod, trainers)
        if self.progress_before_gate and side.early is not None:
            ranks = side.early
        here = Here(name(pod), uid(pod), side.shown, ranks, side.late)
        move: Move = self.gate_local(
            here, commit=commit, round=live, drain=drain, vote=vote, last_commit=last
        )
        if move.gate is not None:
            shown = replace(move.gate, reason="")
            if shown == side.shown:
                return None
            return f"{pod} shows {shown.phase}", self.names.of(side._replace(shown=shown))
        if move.vote is None or side.request is not None or side.cut:
            return None
        assert commit is not None
        self.check_word(pod, move.vote, trainers, commit)
        compares, _ = self.vote_transaction(GENERATION, name(pod), move.vote, commit, drain)
        compared = {compare.key for compare in compares}
        request = Request(
            replace(move.vote, mod_revision=1, failed=_short(move.vote.failed)),
            vote,
            commit if GENERATION.commit in compared else None,
            (drain,) if GENERATION.drain(uid(pod)) in compared else None,
        )
        return f"{pod} sends", self.names.of(side._replace(request=request, early=None))

    def landed(self, at: int, pod: int, number: int) -> tuple[int, int]:
        side, store = self.names.part[number], self.names.part[at]
        request = side.request
        recorded = store.votes[pod]
        as_known = (
            recorded == request.recorded
            and request.commit in (None, store.commit)
            and request.drain in (None, (store.drains[pod],))
        )
        if as_known:
            store = store._replace(votes=put(store.votes, pod, request.vote))
        return self.names.of(store), self.names.of(side._replace(request=None))

    # --- what a rank does ---

    def stepped(self, pod: int, number: int, side: int) -> tuple[str, int] | None:
        """Do what a rank does by itself; None where it waits for its gate or for the others."""
        trainer: Trainer = self.names.part[number]
        shown = self.names.part[side].shown
        read = shown and rank_gate(shown)
        if trainer.at == "start":
            if shown is None or shown.master != trainer.rank.master:
                return None
            base = shown.last_commit.step if shown.last_commit else 0
            rank = boundary.arrive(trainer.rank, base)._replace(matched=True)
            # It tells of no boundary yet: the first that it may save at is the one after this.
            return "begins", self.names.of(trainer._replace(at="enter", rank=rank, told=rank))
        if trainer.at == "enter":
            verdict, rank = boundary.begin(trainer.rank, read)
            if not self.waits_to_begin or pod == self.rules.outsider:
                verdict = boundary.GO
            if verdict == boundary.WAIT:
                return None
            if verdict == boundary.PUBLISH:
                return "gives up", self.names.of(trainer._replace(rank=rank, told=rank))
            at: At = "end" if trainer.rank.step >= self.end_step else "train"
            return "goes", self.names.of(trainer._replace(at=at))
        if trainer.at == "publish":
            after = trainer._replace(at="read", told=trainer.rank)
            return "publishes", self.names.of(after)
        if trainer.at == "leave":
            return "leaves its loop", self.names.of(trainer._replace(at="away", away=True))
        if trainer.at == "away":
            rank = boundary.enter_again(trainer.rank)
            told = rank._replace(step=-1) if self.entering_forgets else rank
            after = trainer._replace(at="enter", rank=rank, told=told, away=False)
            return "enters the next loop", self.names.of(after)
        if trainer.at == "save":
            epoch, step = trainer.rank.saving, trainer.rank.step
            rank = boundary.acknowledge(trainer.rank)
            after = trainer._replace(at="read", rank=rank, told=rank, saved=(epoch, step))
            return "saves", self.names.of(after)
        if trainer.at != "read":
            return None
        if pod == self.rules.outsider:
            return self.goes(trainer)
        if trainer.read_early is not None:
            read, trainer = trainer.read_early, trainer._replace(read_early=None)
        verdict, rank = self.boundary_decide(trainer.rank, read)
        after = trainer._replace(rank=rank)
        if verdict == boundary.GO:
            return self.goes(after)
        if verdict == boundary.PUBLISH:
            early = None if self.gate_read_again else read
            after = after._replace(at="publish", read_early=None if rank.held else early)
        elif verdict == boundary.SAVE:
            after = after._replace(at="save")
        elif after == self.names.part[number]:
            return None
        return f"reads: {verdict}", self.names.of(after)

    def goes(self, trainer: Trainer) -> tuple[str, int]:
        done = trainer.rank.step // self.rules.stride
        at: At = "train"
        if trainer.rank.step >= self.end_step:
            at = "end"
        elif self.rules.block and done and done % self.rules.block == 0:
            at = "leave"
        return "goes", self.names.of(trainer._replace(at=at))

    def arrived(self, pod: int, number: int, side: int) -> int:
        """A rank that trains comes to its next boundary."""
        trainer: Trainer = self.names.part[number]
        stride = self.rules.strides[pod] if self.rules.strides else self.rules.stride
        rank = boundary.arrive(trainer.rank, trainer.rank.step + stride)
        if self.gate_before_publishing:
            shown = self.names.part[side].shown
            early = rank_gate(shown)
            return self.names.of(trainer._replace(at="publish", rank=rank, read_early=early))
        return self.names.of(trainer._replace(at="read", rank=rank, told=rank))

    def failed(self, number: int) -> int:
        trainer: Trainer = self.names.part[number]
        after = trainer._replace(at="publish", rank=boundary.fail(trainer.rank, "f"))
        return self.names.of(after)

    def in_step(self, state: State, number: int) -> bool:
        """Whether all others have given their part of the step this rank is in."""
        me: Trainer = self.names.part[number]
        for other in state[self.rank_at :]:
            if other != number:
                them: Trainer = self.names.part[other]
                if them.rank.master != me.rank.master or them.at == "none":
                    continue
                behind = them.rank.step < me.rank.step or them.at == "start"
                if behind or (them.rank.step == me.rank.step and them.at not in ("train", "end")):
                    return False
        return True

    def check_word(self, pod: int, vote: Vote, trainers: tuple[int, ...], commit: Commit) -> None:
        """What a sidecar says for its ranks, where they take part in this round."""
        ranks: list[Trainer] = [self.names.part[number] for number in trainers]
        told = [rank.told for rank in ranks if rank.told is not None]
        inside = [one for one in told if one.master == token(commit.round)]
        if pod == self.rules.outsider or len(inside) < len(ranks):
            return
        if vote.acked is not None and any(gave_up(one, commit.epoch) for one in ranks):
            raise Broken(f"{pod} acknowledges an epoch that its rank has given up")
        if vote.vote is None:
            raise Broken(f"the ranks of {pod} take part, and its sidecar says that they do not")
        failed = any(one.failed and one.failed[0] == commit.epoch for one in inside)
        if vote.failed and not failed and not vote.failed.startswith(DIFFER):
            raise Broken(f"the ranks of {pod} can still save, and its sidecar gives that up")

    # --- all steps from a state ---

    def progress_steps(self, state: State) -> Iterator[Step]:
        """Everything that happens by itself, sooner or later."""
        part, cached = self.names.part, self.cached
        at, env = state[0], part[state[1]]
        store: Store = part[at]
        for pod in self.pods:
            node = store.nodes[pod]
            if node in ("none", "gone"):
                continue
            where = self.side_at + pod
            number = state[where]
            side: Side = part[number]
            if side.request is not None and env.full:
                refused = cached(self.lost, number)
                yield f"the request of {pod} is refused", _swap(state, (where, refused))
            elif side.request is not None:
                after, mine = cached(self.landed, at, pod, number)
                yield f"the request of {pod} lands", _swap(state, (0, after), (where, mine))
            if not side.up:
                yield f"{pod} starts again", self.started(state, pod)
            else:
                waits = side.shown is not None and side.shown.phase in WAITS
                if waits and side.late != (side.cut or env.full):
                    turned = self.names.of(side._replace(late=not side.late))
                    what = "a write is answered" if side.late else "no write is answered for long"
                    yield f"{what} to {pod}", _swap(state, (where, turned))
                if side.cut:
                    mended = cached(self.cut, number, False)
                    yield f"{pod} is connected again", _swap(state, (where, mended))
                elif side.mirror != at:
                    yield f"{pod} hears", _swap(state, (where, cached(self.heard, number, at)))
                if not side.cut and side.mirror >= 0 and not env.full:
                    made = cached(self.applied, at, side.mirror, pod, False, env.due)
                    if made is not None:
                        yield made[0], self.checked(state, made[1])
                ranks = self.ranks_of[pod]
                moved = cached(self.moved, pod, number, state[ranks.start : ranks.stop])
                if moved is not None and not (env.full and moved[0].endswith("sends")):
                    yield moved[0], _swap(state, (where, moved[1]))
                early: tuple[RankProgress, ...] = ()
                if self.progress_before_gate and side.early is None:
                    early = self.progress(pod, state[ranks.start : ranks.stop])
                if early:
                    yield (
                        f"{pod} reads progress",
                        _swap(state, (where, self.names.of(side._replace(early=early)))),
                    )
            yield from self.rank_steps(state, store, pod, number)
            drain = store.drains[pod]
            if drain is not None:
                released = side.shown is not None and side.shown.granted
                if released or env.due[pod] == 2:
                    yield f"SIGTERM passes to {pod}", self.terminated(state, store, pod, released)
                if node == "stopped" and drain.outcome:
                    continue
            elif node == "stopped" and not env.full:
                yield (
                    f"{pod} asks again",
                    _swap(
                        state,
                        (0, self.names.of(store._replace(nodes=put(store.nodes, pod, "asking")))),
                    ),
                )
        if not env.full:
            yield from self.round_steps(state, store)

    def rank_steps(self, state: State, store: Store, pod: int, side: int) -> Iterator[Step]:
        part, cached = self.names.part, self.cached
        for where in self.ranks_of[pod]:
            number = state[where]
            trainer: Trainer = part[number]
            if trainer.at == "none":
                continue
            if trainer.at == "train":
                if not self.rules.lockstep or self.in_step(state, number):
                    if trainer.rank.master == token(store.number):
                        self.may_arrive(state, store, pod, trainer)
                    after = cached(self.arrived, pod, number, side)
                    yield f"rank {where - self.rank_at} arrives", _swap(state, (where, after))
                continue
            made = cached(self.stepped, pod, number, side)
            if made is None:
                continue
            if made[0] == "goes":
                cached(self.may_go, state[0], made[1], pod)
            if made[0] == "begins" and part[made[1]].rank.step != part[state[1]].base:
                raise Broken(f"rank {where - self.rank_at} begins from another step")
            label = f"rank {where - self.rank_at} at {trainer.rank.step} {made[0]}"
            yield label, _swap(state, (where, made[1]))

    def round_steps(self, state: State, store: Store) -> Iterator[Step]:
        """What agents and the rendezvous do."""
        of = self.names.of
        if store.closed:
            return
        if not store.complete:
            ready = [pod for pod in self.listed(store) if store.nodes[pod] == "asking"]
            if ready == self.listed(store) and len(ready) >= self.rules.least:
                yield f"round {store.number} is complete", self.completed(state, store, ready)
            return
        if store.finishing and all(store.nodes[pod] != "in" for pod in store.members):
            yield "the run is closed", _swap(state, (0, of(store._replace(closed=True))))
        must_end = self.cached(self.must_end, state[0])
        for pod in store.members:
            drain = store.drains[pod]
            if store.nodes[pod] != "in":
                continue
            numbers = [state[where] for where in self.ranks_of[pod]]
            if all(self.names.part[number].at == "end" for number in numbers):
                nodes = put(store.nodes, pod, "done")
                after = store._replace(nodes=nodes, finishing=True)
                yield f"{pod} has finished", _swap(state, (0, of(after)))
            elif must_end and drain is None:
                self.cached(self.not_cut_short, state[0])
                after = store._replace(nodes=put(store.nodes, pod, "asking"))
                yield f"{pod} leaves the round", self.without_ranks(state, pod, after)
        if must_end and all(self.is_out(store, pod) for pod in store.members):
            nodes = tuple(
                "stopped"
                if node == "in" or (node == "left" and store.drains[pod])
                else "asking"
                if node == "left"
                else node
                for pod, node in enumerate(store.nodes)
            )
            after = store._replace(number=store.number + 1, complete=False, members=(), nodes=nodes)
            yield f"round {store.number} is over", _swap(state, (0, of(after)))

    def is_out(self, store: Store, pod: int) -> bool:
        """Whether nobody waits for this pod to leave the round: it has, or it is a leaver."""
        drain = store.drains[pod]
        if store.nodes[pod] != "in" or drain is None:
            return store.nodes[pod] != "in"
        lost = any(store.nodes[other] not in ("in", "done") for other in store.members)
        return bool(drain.outcome) or (self.leavers_are_excused and lost)

    def must_end(self, at: int) -> bool:
        store = self.names.part[at]
        if store.finishing:
            return False
        snapshot, listed = self.membership(store)
        live = self.live_round(store)
        saved = self.savers(snapshot, self.votes(store), RUN, store.number)
        return (
            bool(live.left - set(saved.values()))
            or self.ends_round(snapshot, RUN, store.number)
            or any(
                (drain := store.drains[pod]) is not None and bool(drain.outcome)
                for pod in store.members
            )
            or (bool(live.reforms) and not self.joins_wait(snapshot, listed, RUN, store.number))
        )

    def completed(self, state: State, store: Store, ready: list[int]) -> State:
        members = tuple(ready[: self.rules.most])
        if any(store.drains[pod] for pod in members):
            raise Broken("I2: who drains is in a new round")
        nodes = tuple("in" if pod in members else n for pod, n in enumerate(store.nodes))
        after = store._replace(complete=True, members=members, nodes=nodes)
        env: Env = self.names.part[state[1]]
        base = store.last.step if store.last else 0
        fresh = self.names.of(Trainer("start", boundary.Rank(token(store.number)), None))
        changes = [(0, self.names.of(after)), (1, self.names.of(env._replace(base=base)))]
        changes += [(where, fresh) for pod in members for where in self.ranks_of[pod]]
        return _swap(state, *changes)

    def without_ranks(self, state: State, pod: int, store: Store) -> State:
        absent = self.names.of(ABSENT)
        return _swap(
            state, (0, self.names.of(store)), *((where, absent) for where in self.ranks_of[pod])
        )

    def terminated(self, state: State, store: Store, pod: int, released: bool) -> State:
        drain = store.drains[pod]
        if released and not (drain and drain.outcome):
            raise Broken("I7: SIGTERM is released before the leave is on record")
        side = self.names.of(Side(False, False, -1, None, False, None))
        after = store._replace(nodes=put(store.nodes, pod, "gone"))
        return _swap(self.without_ranks(state, pod, after), (self.side_at + pod, side))

    # --- small changes of a sidecar ---

    def started(self, state: State, pod: int) -> State:
        """Start a sidecar: a gate that is cut stays so until a write is answered."""
        where = self.side_at + pod
        side: Side = self.names.part[state[where]]
        shown = side.shown
        if self.gate_cleared_at_start and shown is not None:
            shown = replace(shown, phase="idle", step=None)
        late = shown is not None and shown.cut
        after = side._replace(up=True, mirror=-1, shown=shown, late=late)
        changes = [(where, self.names.of(after))]
        if self.failed_forgotten_at_start:
            for rank in self.ranks_of[pod]:
                trainer: Trainer = self.names.part[state[rank]]
                told = trainer.told and trainer.told._replace(failed=None)
                changes.append((rank, self.names.of(trainer._replace(told=told))))
        return _swap(state, *changes)

    def heard(self, number: int, at: int) -> int:
        return self.names.of(self.names.part[number]._replace(mirror=at))

    def cut(self, number: int, off: bool) -> int:
        return self.names.of(self.names.part[number]._replace(cut=off))

    def crashed(self, number: int) -> int:
        return self.names.of(self.names.part[number]._replace(up=False, mirror=-1, early=None))

    def lost(self, number: int) -> int:
        return self.names.of(self.names.part[number]._replace(request=None))

    # --- what may happen ---

    def event_steps(self, state: State) -> Iterator[Step]:
        """Notices, joins and cancels: what people and the cluster do."""
        part, of = self.names.part, self.names.of
        env, store = part[state[1]], part[state[0]]
        if env.full:
            yield "the store takes writes again", _swap(state, (1, of(env._replace(full=False))))
            return
        for pod in env.to_notice:
            if store.nodes[pod] in ("none", "gone") or store.closed:
                continue
            preempted = pod in self.rules.preempted
            drain = Drain(uid(pod), name(pod), "spot", "hand", preempted=preempted, mod_revision=1)
            after = of(store._replace(drains=put(store.drains, pod, drain)))
            told = env._replace(to_notice=tuple(p for p in env.to_notice if p != pod))
            yield f"notice for {pod}", _swap(state, (0, after), (1, of(told)))
        for pod in env.to_join:
            after = of(store._replace(nodes=put(store.nodes, pod, "asking")))
            joined = env._replace(to_join=tuple(p for p in env.to_join if p != pod))
            yield f"{pod} joins", _swap(state, (0, after), (1, of(joined)))
        for pod in self.pods if env.to_cancel else ():
            if store.drains[pod] is None or store.nodes[pod] == "gone":
                continue
            made = self.cancel(KEYS, self.membership(store)[0], uid(pod))
            if isinstance(made, str):
                continue
            after = of(self.written(store, made[1]))
            told = env._replace(
                to_cancel=env.to_cancel - 1,
                cancelled=env.cancelled | {pod},
                due=put(env.due, pod, 0),
            )
            yield f"cancel of {pod}", _swap(state, (0, after), (1, of(told)))

    def fault_steps(self, state: State) -> Iterator[Step]:
        part, cached, faults = self.names.part, self.cached, self.rules.faults
        store, env = part[state[0]], part[state[1]]
        if not env.faults or store.closed:
            return
        less = (1, self.names.of(env._replace(faults=env.faults - 1)))
        if "full" in faults and not env.full:
            full = self.names.of(env._replace(faults=env.faults - 1, full=True))
            yield "the store takes no writes", _swap(state, (1, full))
        for pod in self.pods:
            where = self.side_at + pod
            number = state[where]
            if store.nodes[pod] in ("none", "gone"):
                continue
            side: Side = part[number]
            if "crash" in faults and side.up and side.mirror >= 0:
                yield (
                    f"the sidecar of {pod} crashes",
                    _swap(state, less, (where, cached(self.crashed, number))),
                )
            if "cut" in faults and side.up and not side.cut:
                yield (
                    f"{pod} is cut off",
                    _swap(state, less, (where, cached(self.cut, number, True))),
                )
            if "lose" in faults and side.request is not None:
                yield (
                    f"the request of {pod} is lost",
                    _swap(state, less, (where, cached(self.lost, number))),
                )
            if "rank" in faults and store.nodes[pod] == "in" and store.complete:
                nodes = put(store.nodes, pod, "left")
                after = store._replace(nodes=nodes)
                yield f"ranks of {pod} die", _swap(self.without_ranks(state, pod, after), less)
            if "vanish" in faults and store.nodes[pod] == "asking" and store.complete:
                gone = store._replace(nodes=put(store.nodes, pod, "gone"))
                yield f"{pod} vanishes", _swap(self.without_ranks(state, pod, gone), less)
            if "fail" in faults:
                for rank in self.ranks_of[pod]:
                    if part[state[rank]].at == "save":
                        yield (
                            f"rank {rank - self.rank_at} cannot save",
                            _swap(state, less, (rank, cached(self.failed, state[rank]))),
                        )
            for rank in self.ranks_of[pod]:
                trainer: Trainer = part[state[rank]]
                hangs: dict[At, Fault] = {"save": "stuck", "away": "stay"}
                if hangs.get(trainer.at) in faults:
                    stuck = self.names.of(trainer._replace(at="stuck"))
                    yield (
                        f"the {trainer.at} of rank {rank - self.rank_at} never ends",
                        _swap(state, less, (rank, stuck)),
                    )

    def timer_steps(self, state: State) -> Iterator[Step]:
        """Timers that run out."""
        part = self.names.part
        at, env = state[0], part[state[1]]
        store: Store = part[at]
        for pod in self.pods:
            side: Side = part[state[self.side_at + pod]]
            if store.nodes[pod] in ("none", "gone"):
                continue
            if side.up and not side.cut and side.mirror >= 0 and not env.full:
                made = self.cached(self.applied, at, side.mirror, pod, True, env.due)
                if made is not None and made != self.cached(
                    self.applied, at, side.mirror, pod, False, env.due
                ):
                    yield f"(time) {made[0]}", self.checked(state, made[1])
            drain = store.drains[pod]
            if not self.rules.deadlines:
                continue
            if drain is not None and not drain.outcome and env.due[pod] < 2:
                due = self.names.of(env._replace(due=put(env.due, pod, env.due[pod] + 1)))
                yield f"the deadline of {pod} comes nearer", _swap(state, (1, due))

    def hurried_steps(self, state: State) -> Iterator[Step]:
        """Timers that run out although something else could still happen."""
        env: Env = self.names.part[state[1]]
        if env.hurry:
            for label, after in self.timer_steps(state):
                changed: Env = self.names.part[after[1]]
                less = self.names.of(changed._replace(hurry=env.hurry - 1))
                yield f"(early) {label}", _swap(after, (1, less))

    # --- what must hold ---

    def checked(self, state: State, at: int) -> State:
        """Check a write of the commit or of outcomes against what is true."""
        before: Store = self.names.part[state[0]]
        after: Store = self.names.part[at]
        env: Env = self.names.part[state[1]]
        was, now = before.commit, after.commit
        if now is not None and (was is None or was.phase != now.phase):
            if now.phase == "commit":
                self.check_agreed(state, after)
            if now.phase == "done":
                self.check_done(state, after)
            if now.phase == "idle" and was is not None and was.phase == "done":
                self.check_kept(after)
        for pod in self.pods:
            then, drain = before.drains[pod], after.drains[pod]
            if drain is not None and drain.outcome and not (then and then.outcome):
                self.check_outcome(state, after, pod, drain, env)
        return _swap(state, (0, at))

    def inside(self, state: State, store: Store) -> Iterator[tuple[int, Trainer]]:
        for pod in store.members:
            for where in self.ranks_of[pod]:
                trainer: Trainer = self.names.part[state[where]]
                if trainer.at != "none" and trainer.rank.master == token(store.number):
                    yield where - self.rank_at, trainer

    def check_agreed(self, state: State, store: Store) -> None:
        assert store.commit is not None
        assert store.commit.step is not None
        for rank, trainer in self.inside(state, store):
            past = trainer.at in PAST and trainer.rank.step >= store.commit.step
            if past and not gave_up(trainer, store.commit.epoch):
                raise Broken(f"I3: rank {rank} is past step {store.commit.step} already")

    def contradicted(self, state: State, store: Store, cursor: str) -> bool:
        """Whether a rank of the world has given another cursor with its save than ``cursor``."""
        given = {self.cursor(rank) for rank, _ in self.inside(state, store)} - {""}
        return bool(given) and given != {cursor}

    def check_done(self, state: State, store: Store) -> None:
        commit = store.commit
        assert commit is not None
        if store.last is None or (store.last.round, store.last.epoch) != (
            store.number,
            commit.epoch,
        ):
            raise Broken("I7: done without a last commit of this round")
        if self.contradicted(state, store, store.last.cursor):
            raise Broken("I12: done, and its ranks stand at different places in the data")
        for rank, trainer in self.inside(state, store):
            if trainer.saved != (commit.epoch, commit.step):
                raise Broken(f"I7: done, but rank {rank} saved {trainer.saved}")
            moved = trainer.at in PAST or trainer.rank.step != commit.step
            if moved and not gave_up(trainer, commit.epoch):
                raise Broken(f"I3: done, but rank {rank} has gone on")
        if store.last.step != commit.step or not store.complete:
            raise Broken("I3: the last commit is another step than was saved")

    def is_last(self, store: Store) -> bool:
        """Whether no replacement can come before a pod of the world has gone."""
        drains = [store.drains[pod] for pod in store.members if store.nodes[pod] == "in"]
        return not self.listed(store) or any(drain and drain.preempted for drain in drains)

    def check_kept(self, store: Store) -> None:
        """After a save training goes on: that of a pod that waits for a replacement."""
        for pod in store.members:
            drain = store.drains[pod]
            if drain is not None and store.nodes[pod] == "in" and self.is_last(store):
                raise Broken(f"I10: {pod} is kept, and no replacement can come")

    def check_outcome(self, state: State, store: Store, pod: int, drain: Drain, env: Env) -> None:
        if pod in env.cancelled:
            raise Broken(f"a cancelled drain of {pod} is released")
        commit = store.commit
        if (
            drain.outcome == "uncommitted"
            and pod in store.members
            and store.nodes[pod] == "in"
            and (store.complete and not store.finishing and commit is not None)
            and (commit.round != store.number or uid(pod) not in commit.leaving)
        ):
            raise Broken(f"{pod} goes without a save that nobody was asked for")
        enough = len(self.listed(store)) >= self.rules.least
        if env.due[pod] < 2:
            if drain.outcome == "expired":
                raise Broken(f"{pod} expires before its deadline")
            kept = not self.is_last(store) and not drain.preempted
            if self.rules.policy.below_min == "hold" and not enough and kept:
                raise Broken(f"I10: {pod} is released below min")
        if drain.outcome == "committed":
            if store.last is None or store.last.step != drain.step:
                raise Broken(f"I7: {pod} may go, but its commit is not on record")
            for where in self.ranks_of[pod]:
                trainer: Trainer = self.names.part[state[where]]
                saved = trainer.saved is not None and trainer.saved[1] == drain.step
                stays = trainer.at not in PAST or (commit and gave_up(trainer, commit.epoch))
                if trainer.at != "none" and not (saved and stays):
                    raise Broken(f"I7: {pod} may go, but has not saved step {drain.step}")

    def may_go(self, at: int, number: int, pod: int) -> None:
        """A rank leaves its boundary: it must not be one that it has to stay at."""
        store, trainer = self.names.part[at], self.names.part[number]
        commit, step = store.commit, trainer.rank.step
        drain = store.drains[pod]
        if commit is not None and gave_up(trainer, commit.epoch):
            return  # whatever comes of that epoch, no checkpoint of it is wrong
        if drain and drain.outcome == "committed" and drain.step is not None and step >= drain.step:
            raise Broken(f"step {step + 1} is trained by {pod} after its grant")
        if not store.complete or trainer.rank.master != token(store.number) or commit is None:
            return
        if (commit.run, commit.round) != (RUN, store.number):
            return
        if commit.phase == "done":
            raise Broken(f"a rank of {pod} trains on after done: step {step + 1} is trained twice")
        if commit.phase == "commit" and commit.step is not None and step >= commit.step:
            raise Broken(f"I3: a rank of {pod} runs past step {commit.step}")

    def may_arrive(self, state: State, store: Store, pod: int, trainer: Trainer) -> None:
        """A rank of this round has finished a step: not if that ends without a save of all.

        Where some have trained, and then take no part, nobody knows of the steps of the others.
        """
        commit, rules = store.commit, self.rules
        if commit is None or not commit.refused or not commit.is_of(RUN, store.number):
            return
        if gave_up(trainer, commit.epoch):
            return
        ranks = [trainer for _, trainer in self.inside(state, store)]
        whole = len(ranks) == len(store.members) * rules.ranks and not store.finishing
        if whole and rules.lockstep and rules.outsider is None and not rules.block:
            raise Broken(f"I2: {pod} trains a step that nobody saves")

    def not_cut_short(self, at: int) -> None:
        """Somebody leaves a round: not for a leaver that has saved while others still do.

        Nor for newcomers whom nobody was asked to save for.
        """
        store: Store = self.names.part[at]
        commit = store.commit
        if any(store.nodes[pod] == "asking" for pod in store.members):
            return  # it is over already: another one has left it
        snapshot, _ = self.membership(store)
        live = self.live_round(store)
        lost = bool(live.left) or any(
            (drain := store.drains[pod]) is not None and drain.outcome for pod in store.members
        )
        if not lost and not self.ends_round(snapshot, RUN, store.number):
            here = commit if commit is not None and commit.round == store.number else Commit()
            if not (here.admitted or (here.refused and here.joins)):
                raise Broken("newcomers are let in without a save that nobody was asked for")
        if commit is None or (commit.phase, commit.round) != ("commit", store.number):
            return
        gone = [
            pod
            for pod in store.members
            if store.nodes[pod] in ("left", "gone")
            or ((drain := store.drains[pod]) is not None and drain.outcome)
        ]
        votes = [store.votes[pod] for pod in gone if store.drains[pod] is not None]
        saved = [v for v in votes if v and v.epoch == commit.epoch and v.acked is not None]
        if gone and len(saved) == len(gone):
            raise Broken(f"I7: the save of step {commit.step} is cut short by who has saved it")

    def check_end(self, state: State) -> None:
        """Nothing can happen any more: everybody is done, gone, or waits for more members."""
        store: Store = self.names.part[state[0]]
        env: Env = self.names.part[state[1]]
        if env.full:
            for rank, trainer in self.inside(state, store) if store.complete else ():
                if trainer.at in ("enter", "read"):
                    raise Broken(f"rank {rank} waits for ever for a store that takes no writes")
            return
        few = not store.complete and len(self.listed(store)) < self.rules.least
        live = self.live_round(store)
        asked = bool(live.reforms) or any(store.drains[pod] for pod in store.members)
        hangs = any(
            self.names.part[state[where]].at == "stuck"
            for pod in store.members
            for where in self.ranks_of[pod]
        )
        for pod in self.pods:
            node, drain = store.nodes[pod], store.drains[pod]
            if node in ("gone", "done", "none") or (store.closed and node in ("left", "asking")):
                continue
            if node == "in" and hangs and (store.finishing or not asked):
                continue  # a script that hangs by itself is not the drain's affair
            spare = store.complete and len(store.members) >= self.rules.most
            if node == "asking" and (few or spare) and drain is None:
                continue
            below = 0 < len(self.listed(store)) < self.rules.least
            kept = drain is not None and not drain.preempted and not self.rules.deadlines
            if node in ("asking", "stopped") and kept and below:
                continue  # until a replacement comes: that is the policy
            raise Broken(f"pod {pod} waits for ever: {node}, {drain}, {store.commit}")

    # --- how it is explored ---

    def offered(self, state: State, random: Random | None) -> tuple[list[Step], Iterator[Step]]:
        """See ``explorer.Model``: timers run out once nothing else can happen, or early."""
        if random is not None and random.random() < 0.05:
            self.pace = [random.choice((0.02, 1.0)) for _ in state]
        found = list(self.progress_steps(state))
        early = bool(found) and (random is None or random.random() < 0.2)
        hurried = self.hurried_steps(state) if early else iter(())
        others = chain(self.event_steps(state), self.fault_steps(state), hurried)
        return found or list(self.timer_steps(state)), others

    def begin_walk(self) -> None:
        self.pace = []

    def key(self, state: State) -> int:
        return hash(state)

    def pick(self, random: Random, state: State, steps: list[Step]) -> Step:
        """Whoever takes steps is quick or slow for a while, so that one may fall far behind."""
        pace = self.pace or [1.0] * len(state)
        ((label, after),) = random.choices(steps, [pace[_actor(state, s)] for _, s in steps])
        return label, after


def _short(failed: str) -> str:
    """Why a save failed, as far as anybody acts by it."""
    return DIFFER[0] if failed.startswith(DIFFER) else failed[:1]


def _actor(state: State, after: State) -> int:
    """Which part of the state a step changes last: a rank's or a sidecar's, or else the store."""
    return max(at for at, (was, now) in enumerate(zip(state, after, strict=True)) if was != now)


def _swap(state: State, *changes: tuple[int, int]) -> State:
    parts = list(state)
    for at, number in changes:
        parts[at] = number
    return tuple(parts)
