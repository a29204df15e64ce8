# SPDX-License-Identifier: Apache-2.0
"""What must hold of rounds: one at a time, each frozen once, and the same to all who are in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.records import LOST, Node, Round, Seat
from rdzv.drain.standing import granted
from rdzv.errors import RecordError
from rdzv.mirror import Mirror
from rdzv.records.job import Job
from rdzv.snapshot import Snapshot
from rdzv.store import WatchEvent
from tests.simulation.nodes import KEYS
from tests.simulation.other_runs import FAILED, FRESH
from tests.simulation.pods import Pod, SimulatedJob
from tests.simulation.ranks import RoundId
from tests.simulation.split_invariants import SplitInvariants
from tests.simulation.torchrun import NO_RESTARTS, RUN, SECOND, Torchrun

RUNS = (RUN, SECOND, FAILED, FRESH)
ENDINGS = {
    run: KEYS.in_generation(1).run(run).round.removeprefix(KEYS.in_generation(1).prefix)
    for run in RUNS
}
"""How the keys of their rounds end, in every life of the job."""


KEPT_S = RoundPolicy(1, 1).orphan_hold_s
"""A world whose members all vanished is kept for so long."""


class RoundInvariants:
    """I1, I2 and I5, as far as rounds go. ``may_close``: somebody was told to close the run.

    ``may_form``: something happened for which a world may have to form again. ``formed_s``: when
    somebody was handed a world last. ``round``: the newest of ``run``, which the job is there for.
    ``at_freeze`` is called with the next round of it that is frozen, once, ``at_finish`` with the
    next one in which somebody has come to the exit barrier. ``begins_again`` is called with a round
    whose first beginning nobody knows of any more.
    """

    def __init__(
        self,
        job: SimulatedJob,
        truth: Mirror,
        splits: SplitInvariants,
        break_: Callable[[str], None],
    ) -> None:
        self.frozen: dict[RoundId, tuple[Seat, ...]] = {}
        self.run = RUN
        self.round = Round()
        self.may_close = False
        self.may_form = True
        self.formed_s = 0.0
        self.at_freeze: Callable[[Round], None] | None = None
        self.at_finish: Callable[[Round], None] | None = None
        self.begins_again: Callable[[RoundId], None] = lambda round: None
        self._job = job
        self._truth = truth
        self._splits = splits
        self._break = break_
        self._rounds: dict[str, Round] = {}
        self._newest: dict[str, Round] = {}
        self._lossy: set[RoundId] = set()
        """Rounds whose worlds have ended by a loss."""
        self._went_back = False

    def committed(self, before: Snapshot, events: Sequence[WatchEvent]) -> None:
        """Look at one revision; ``before``: the membership as it was."""
        for event in events:
            key = event.kv.key
            if event.kind != "put":
                continue
            with suppress(RecordError):  # somebody has damaged it
                if key == KEYS.job:
                    self._check_life(before, Job.from_kv(event.kv))
                for run, ending in ENDINGS.items():
                    if key.endswith(ending):
                        self._wrote_round(before, run, key, Round.from_kv(event.kv))

    def restored(self) -> None:
        """The store has gone back: what it holds now may be written over by what came later."""
        self._rounds = {}
        self._went_back = True
        job = Job.from_kv(self._truth.kvs[KEYS.job]) if KEYS.job in self._truth.kvs else None
        here = KEYS.in_generation(job.generation).run(self.run).round if job else ""
        kv = self._truth.kvs.get(here)
        self.round = Round.from_kv(kv) if kv is not None else Round()

    def _wrote_round(self, before: Snapshot, run: str, key: str, new: Round) -> None:
        known = self._rounds.get(key)
        self._rounds[key] = self._newest[run] = new
        if run == self.run:
            self.round = new
        if known is not None and new.age < known.age:
            self._break(f"I1: round {new.number} is written over the later {known.number}")
        if new.closed and not self.may_close and run != FAILED:
            self._break(f"I5: the run is closed by {new.closed}, though nobody was told to")
        if not new.complete or not new.frozen:
            return
        if new.ends.startswith(LOST):
            self._lossy.add((run, new.number))
        if run == RUN and new.finishing and not new.closed and self.at_finish is not None:
            act, self.at_finish = self.at_finish, None
            act(new)
        frozen = self.frozen.get((run, new.number))
        if frozen is not None and frozen != new.frozen and self._is_forgotten(run, new.number):
            self.begins_again((run, new.number))
            frozen = None
        if frozen is None:
            self._check_freeze(before, run, new)
            self._check_ranks(before, new, known)
            self.frozen[run, new.number] = new.frozen
            if run == RUN and self.at_freeze is not None:
                act, self.at_freeze = self.at_freeze, None
                act(new)
        elif frozen != new.frozen and known is not None and new.world > known.world:
            self.frozen[run, new.number] = new.frozen  # It has changed in place.
            self._check_place(before, new)
        elif frozen != new.frozen:
            self._break(f"I1: round {new.number} is frozen twice: {frozen} and {new.frozen}")

    def _check_place(self, before: Snapshot, new: Round) -> None:
        size = len(new.frozen)
        if not any(sizes.largest(size) == size for sizes in self._job.former_sizes):
            self._break(
                f"I1: a world of {size} is formed in place, of {self._job.sizes.sizes_in_words}"
            )

    def _is_forgotten(self, run: str, number: int) -> bool:
        """Whether a restored store has lost a round, and nobody is left who could know of it."""
        seats = self.frozen[run, number]
        return self._went_back and not any(self._is_in(s.member, (run, number)) for s in seats)

    def _check_freeze(self, before: Snapshot, run: str, new: Round) -> None:
        size = len(new.frozen)
        if not any(sizes.largest(size) == size for sizes in self._job.former_sizes):
            self._break(f"I1: a world of {size} is formed, of {self._job.sizes.sizes_in_words}")
        generation = before.job.generation if before.job else 1
        keys = KEYS.in_generation(generation).run(run)
        draining = {d.member for d in before.drains.values() if before.has_name(d)}
        for seat in new.frozen:
            if seat.member in draining:
                self._break(f"I2: {seat.member} drains and is frozen into round {new.number}")
            kv = self._truth.kvs.get(keys.node(seat.member))
            node = Node.from_kv(kv) if kv is not None else None
            if node is not None and (node.seat != seat or node.state != "asking"):
                self._break(f"{seat} is frozen into round {new.number} and asked for none: {node}")
        last = run, new.number - 1
        if last not in self._lossy and (former := self.frozen.get(last)) is not None:
            self._job.invariants.quarantines.replaced(before, keys, former, new.frozen)
        for other, number in [one for one in self.frozen if one[0] == run and one[1] < new.number]:
            world = [seat.member for seat in self.frozen[other, number]]
            if self._splits.have_been_away(world, KEPT_S):
                continue  # they cannot know of it, nor can those who have the store know of them
            if self.trains_whole(before, (other, number)):
                self._break(f"I1: round {new.number} is formed while all of {number} train on")

    def _check_ranks(self, before: Snapshot, new: Round, known: Round | None) -> None:
        """The ranks of a block, and of a rack in it, follow one another, and rank 0 stays."""
        members = [seat.member for seat in new.frozen]
        if not set(members) <= before.members.keys():
            return  # of a store that was restored
        places = [before.members[member].topology.split("/") for member in members]
        for depth in (1, 2):
            parts = [tuple(place[:depth]) for place in places]
            borders = sum(one != other for one, other in pairwise(parts))
            if borders != len(set(parts)) - 1:
                self._break(f"ranks: round {new.number} mixes neighbours: {members}, at {places}")
        former = known.former if known is not None else ()
        if former and former[0] in members and members[0] != former[0]:
            self._break(f"ranks: {former[0]} stays, and is rank 0 of round {new.number} no more")

    def _check_life(self, before: Snapshot, new: Job) -> None:
        """Nobody who trains is taken along into the next life of the same Job."""
        old = before.job
        if old is None or new.uid != old.uid or new.generation <= old.generation:
            return
        for run in RUNS:
            current = self._rounds.get(KEYS.in_generation(old.generation).run(run).round)
            if current is None or not current.complete or current.closed:
                continue
            if any(self._is_in(seat.member, (run, current.number)) for seat in current.frozen):
                self._break(
                    f"I1: the job begins its next life {new.generation} while round"
                    f" {current.number} of {run} trains"
                )

    def _is_in(self, member: str, round: RoundId) -> bool:
        return self._job.inside(member, round) is not None

    def trains_whole(self, before: Snapshot, round: RoundId) -> bool:
        """Whether everybody who was in that round is, and somebody of them may train on.

        A world of a Job that is deleted may end after the first one of the next Job has formed.
        """
        members = [seat.member for seat in self.frozen[round]]
        if all(self._job.is_stray(member) for member in members):
            return False
        inside = [pod for name in members if (pod := self._job.inside(name, round)) is not None]
        whole = len(inside) == len(members)
        return whole and not all(_may_go(before, pod) for pod in inside)

    def formed(self, torchrun: Torchrun, number: int, rank: int, size: int) -> None:
        """A torchrun was handed a world."""
        name = torchrun.pod.name
        frozen = self.frozen.get((torchrun.run, number))
        if frozen is None:
            self._break(f"I1: {name} is in round {number}, which nobody completed")
        elif len(frozen) != size or frozen[rank].member != name:
            self._break(f"I1: {name} is {rank} of {size} in round {number}, which is {frozen}")
        self.formed_s = self._job.loop.time()
        if not self.may_form:
            self._break(f"I5: {name} had to form round {number} for an outage")

    def await_the_last_stage(self) -> None:
        """The job is there for the last one of its stages from now on."""
        self.run = SECOND
        self.round = self._newest.get(SECOND, Round())

    def passed_over(self, torchrun: Torchrun) -> None:
        """A torchrun was not started, as its stage has ended well."""
        current = self._newest.get(torchrun.run, Round())
        if current.closed != "success":
            self._break(f"{torchrun.pod.name} passes over {torchrun.run}, which goes on: {current}")

    def gave_up(self, torchrun: Torchrun, why: str) -> None:
        """A torchrun ended by itself."""
        if self._newest.get(torchrun.run, Round()).closed == "success":
            return  # a spare is told no more than that the run is closed
        if not self.may_close or why != NO_RESTARTS:
            self._break(f"I5: the torchrun of {torchrun.pod.name} gave up: {why}")


def _may_go(snapshot: Snapshot, pod: Pod) -> bool:
    drain = snapshot.drains.get(pod.pod_uid)
    return drain is not None and granted(snapshot.commit, drain)
