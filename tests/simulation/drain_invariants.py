# SPDX-License-Identifier: Apache-2.0
"""What must hold of drains: all save the same step, it is on record, and only then may one go."""

from __future__ import annotations

import math
from collections.abc import Callable

from rdzv.records.drain import Commit, Drain, LastCommit
from rdzv.records.job import ROUNDS_PER_LIFE
from rdzv.snapshot import Snapshot, is_enough, listing_of
from tests.simulation.nodes import Sidecar
from tests.simulation.pods import Pod, SimulatedJob
from tests.simulation.ranks import Rank, RoundId
from tests.simulation.round_invariants import RoundInvariants
from tests.simulation.torchrun import port_of

CLOCK_SLACK_S = 0.05


class DrainInvariants:
    """I3, I7 and I10."""

    def __init__(
        self, job: SimulatedJob, rounds: RoundInvariants, break_: Callable[[str], None]
    ) -> None:
        self._job = job
        self._rounds = rounds
        self._break = break_
        self._done: set[int] = set()
        self._recorded: set[tuple[str, int, int, int]] = set()
        self._ended_at: dict[RoundId, int] = {}
        self._ends_shown: dict[RoundId, list[Sidecar | None]] = {}
        """Which sidecars were shown that the round ends."""
        self._ends_lost: set[RoundId] = set()
        """The ends that a restored store has lost."""
        self._due_s: dict[str, float] = {}
        self._outcomes: set[tuple[str, str]] = set()
        self._lifted: dict[tuple[str, str], int] = {}
        """By pod and outcome of each drain that was taken back after its grant: at which
        revision."""
        rounds.begins_again = self._forget

    def _forget(self, round: RoundId) -> None:
        self._ended_at.pop(round, None)
        self._ends_shown.pop(round, None)
        self._ends_lost.discard(round)
        self._job.invariants.splits.forget(round)
        self._job.worlds = {k: world for k, world in self._job.worlds.items() if k[0] != round}

    def shown(self, pod: Pod, commit: Commit) -> None:
        """The sidecar of a pod is shown this commit, and acts by it."""
        round = (commit.run, commit.round)
        worlds = (world for (of, _), world in self._job.worlds.items() if of == round)
        # Newcomers ask again if a restored store has lost that they were let in: what they alone
        # were shown ends no world.
        if commit.granted or (commit.admitted and any(pod.name in one.ranks for one in worlds)):
            self._ends_shown.setdefault(round, []).append(pod.sidecar)

    def restored(self) -> None:
        """The store has gone back: a grant that it has lost before anybody saw it was never one."""
        self._ended_at = {k: step for k, step in self._ended_at.items() if k in self._ends_shown}
        self._ends_lost = set(self._ended_at)
        self._lifted.clear()

    def committed(self, before: Snapshot, after: Snapshot) -> None:
        """Look at one revision."""
        if after.last_commit is not None and after.last_commit != before.last_commit:
            self._check_done(before, after)
        if after.drains is not before.drains:
            self._note_deadlines(after)
        if after.members is not before.members:
            self._check_names(before, after)
        for uid, drain in after.drains.items():
            former = before.drains.get(uid)
            if drain.outcome and (former is None or not former.outcome):
                if former is not None or (uid, drain.outcome) not in self._outcomes:
                    self._check_outcome(before, drain)  # else it is put back, as the store lost it
                self._outcomes.add((uid, drain.outcome))
        for uid in before.drains.keys() - after.drains.keys():
            self._lifted[uid, before.drains[uid].outcome] = after.revision
        commit = after.commit
        if commit is None:
            return
        had = before.commit.granted if before.commit is not None else ()
        for uid in set(commit.granted) - set(had):
            self._check_may_grant(before, uid)
        if (commit.granted or commit.admitted) and commit.step is not None:
            self._ended_at.setdefault((commit.run, commit.round), commit.step)
            self._ends_lost.discard((commit.run, commit.round))

    def _check_done(self, before: Snapshot, after: Snapshot) -> None:
        last, commit = after.last_commit, before.commit
        assert last is not None
        if last.periodic and not last.forgotten:
            self._check_saved(before, last)
            return
        if self._is_put_back(last, after.commit):
            former = before.last_commit
            same = former is not None and (former.run, former.round) == (last.run, last.round)
            if former is not None and same and former.step > last.step:
                self._break(f"I3: the last commit goes back, from {former} to {last}")
            return
        self._recorded.add((last.run, last.round, last.epoch, last.step))
        self._done.add(last.step)
        if commit is None or (commit.phase, commit.epoch) != ("commit", last.epoch):
            self._break(f"I3: step {last.step} is done, but the commit is {commit}")
        run, number = commit.run if commit is not None else "", last.round
        world = self._job.worlds.get(((run, number), f"127.0.0.1:{port_of(run, number)}"))
        for seat in self._rounds.frozen.get((run, number), ()):
            saved = world.saved.get(seat.member, set()) if world else set()
            trained = world.trained.get(seat.member, 0) if world else 0
            if last.step not in saved:
                self._break(f"I3: step {last.step} is done, {seat.member} saved {sorted(saved)}")
            rank = world.ranks.get(seat.member) if world else None
            if trained > last.step and not (rank and rank.gave_up(last.epoch)):
                self._break(f"I3: step {last.step} is done, {seat.member} is at {trained}")

    def _is_put_back(self, last: LastCommit, commit: Commit | None) -> bool:
        """Whether a restored store had lost it: it comes with the commit that ends its round."""
        if commit is None or not (commit.granted or commit.admitted):
            return False
        of_last = (commit.run, commit.round, commit.step) == (last.run, last.round, last.step)
        return of_last and (last.run, last.round, last.epoch, last.step) in self._recorded

    def _check_saved(self, before: Snapshot, last: LastCommit) -> None:
        """I3: a periodic checkpoint is put on record once all of a world have saved it."""
        commit, former = before.commit, before.last_commit
        if commit is not None and commit.phase in ("hold", "commit") and commit.round == last.round:
            self._break(f"I3: the periodic save of step {last.step} cuts into {commit}")
        same_run = former is not None and former.run == last.run
        if (
            former is not None
            and same_run
            and (last.step, last.epoch) <= (former.step, former.epoch)
        ):
            self._break(f"I3: the last commit goes back, from {former} to {last}")
        frozen = [round for round in self._rounds.frozen if round[1] == last.round]
        if not any(self._all_have_saved(round, last.step) for round in frozen):
            self._break(f"I3: step {last.step} is on record, and no world has saved it")
        self._job.timeline.add("store", f"the periodic checkpoint of step {last.step} is on record")

    def _all_have_saved(self, round: RoundId, step: int) -> bool:
        world = self._job.worlds.get((round, f"127.0.0.1:{port_of(*round)}"))
        seats = self._rounds.frozen[round]
        return world is not None and all(step in world.saved.get(seat.member, ()) for seat in seats)

    def _note_deadlines(self, after: Snapshot) -> None:
        now = self._job.loop.time()
        for uid, drain in after.drains.items():
            if drain.seconds_left is not None:
                due_s = now + drain.seconds_left - drain.reserve_s
                self._due_s[uid] = min(self._due_s.get(uid, math.inf), due_s)

    def _check_names(self, before: Snapshot, after: Snapshot) -> None:
        """I7: nobody takes the name of a pod whose save is still under way."""
        for name, new in after.members.items():
            old = before.members.get(name)
            drain = before.drains.get(old.pod_uid) if old is not None else None
            pod = self._job.pod_of(drain.pod_uid) if drain is not None else None
            if drain is None or drain.outcome or pod is None or pod.gone:
                continue
            if new.pod_uid != pod.pod_uid and not self._is_due(pod.pod_uid):
                self._break(f"I7: {new.pod_uid} takes the name of {pod.pod_uid}, which drains")

    def _check_outcome(self, before: Snapshot, drain: Drain) -> None:
        if drain.outcome == "expired":
            self._check_due(drain.pod_uid, drain.member)
            return
        if drain.outcome == "uncommitted":
            self._check_nothing_is_lost(before, drain)
        if drain.outcome != "uncommitted" or self._has_trained(before, drain):
            self._check_may_grant(before, drain.pod_uid)
        if self._goes_in_place(drain):
            return  # That it leaves no work behind is looked at as SIGTERM passes.
        if drain.outcome == "committed" and drain.step not in self._done:
            self._break(f"I7: {drain.member} may go after step {drain.step}, which is not done")

    def _goes_in_place(self, drain: Drain) -> bool:
        return self._job.changes_in_place and drain.outcome == "committed" and drain.step is None

    def _check_nothing_is_lost(self, before: Snapshot, drain: Drain) -> None:
        """I7: who trains is asked to save, unless its world is no more or cannot."""
        pod, commit = self._job.pod_of(drain.pod_uid), before.commit
        rank = pod.torchrun.rank if pod is not None and pod.torchrun is not None else None
        refused = commit is not None and commit.refused and drain.pod_uid in commit.leaving
        if pod is None or rank is None or rank.ended or refused:
            return
        if rank.round not in self._rounds.frozen:
            return
        last, start = before.last_commit, rank.world.start
        if last is not None and (last.run, last.round) == rank.round:
            start = max(start, last.step)
        unsaved = rank.world.trained.get(pod.name, 0) - start
        if unsaved > 0 and self._rounds.trains_whole(before, rank.round):
            self._break(f"I7: {pod.name} may go without a save, {unsaved} steps after the last one")

    def _has_trained(self, snapshot: Snapshot, drain: Drain) -> bool:
        """Whether a world has formed in this life of the job: below min nobody is kept before."""
        life = snapshot.job.generation - 1 if snapshot.job is not None else 0
        return any(number // ROUNDS_PER_LIFE == life for _, number in self._rounds.frozen)

    def _check_may_grant(self, before: Snapshot, uid: str) -> None:
        if self._job.shape.below_min == "commit" or self._is_due(uid):
            return
        if before.job is not None and before.job.paused:
            return  # nobody is kept for a world that must not train
        if self._none_can_come(before, before.drains[uid]):
            return
        if not is_enough(before, listing_of(before)):
            listed = [member.name for member in listing_of(before).listed]
            self._break(f"I10: {uid} is let go while only {listed} are listed")

    def _none_can_come(self, before: Snapshot, drain: Drain) -> bool:
        """Whether all drain, or this pod or one of its world makes room for another."""
        listing, commit = listing_of(before), before.commit
        frozen = self._rounds.frozen.get((commit.run, commit.round), ()) if commit else ()
        world = {seat.member for seat in frozen}
        makes_room = any(one.preempted and one.member in world for one in before.drains.values())
        return drain.preempted or makes_room or not (listing.listed or listing.standby)

    def _is_due(self, uid: str) -> bool:
        # Its own pod knows it from the notice, the others from when the record was written.
        pod = self._job.pod_of(uid)
        told_s = pod.due_s if pod is not None else math.inf
        due_s = min(self._due_s.get(uid, math.inf), told_s)
        return self._job.loop.time() >= due_s - CLOCK_SLACK_S

    def _check_due(self, uid: str, member: str) -> None:
        if not self._is_due(uid):
            self._break(f"I10: {member} expires at {self._due_s.get(uid)}")

    # -- outside the store

    def let_go(self, pod: Pod, snapshot: Snapshot, outcome: str, due_s: float) -> None:
        """SIGTERM passes to the pod's torchrun; its own time is over at ``due_s``."""
        drain = snapshot.drains.get(pod.pod_uid)
        late = self._job.loop.time() >= due_s - CLOCK_SLACK_S or self._is_due(pod.pod_uid)
        lifted, sidecar = self._lifted.get((pod.pod_uid, outcome)), pod.sidecar
        # A cancel may cross the grant that the pod goes by: nothing is lost, as that stood.
        crossed = lifted is not None and (sidecar is None or sidecar.mirror.revision < lifted)
        if not late and not crossed and (drain is None or drain.outcome != outcome):
            # What is on record was due when it was written, by an earlier notice perhaps.
            number = "I10" if outcome == "expired" else "I7"
            self._break(f"{number}: {pod.name} is let go ({outcome}) too early: {drain}")
        elif drain is not None and self._goes_in_place(drain):
            rank = pod.torchrun.rank if pod.torchrun is not None else None
            self._job.in_place.let_go(pod, rank)
        elif outcome == "committed" and drain is not None and drain.step not in (None, *self._done):
            self._break(f"I7: {pod.name} is let go after step {drain.step}, which is not done")

    def starts(self, rank: Rank, step: int) -> None:
        """A rank was told from which step to go on."""
        if self._job.changes_in_place and rank.world.ranks:
            return  # It takes the state of those that train.
        if step != rank.world.start:
            self._break(
                f"I3: {rank.pod.name} starts round {rank.round[1]} from step {step},"
                f" and {rank.world.start} is done"
            )

    def trained(self, rank: Rank, step: int) -> None:
        """A rank has finished a step."""
        commit = self._job.invariants.snapshot.commit
        if commit is not None and rank.gave_up(commit.epoch):
            return  # the store has taken no writes: what it trains may be repeated
        # Of a world that has lost a rank nobody saves the step that this one was in.
        whole = all(one.matched and not one.ended for one in rank.world.ranks.values())
        # Beside a pod that cannot vote, what is made after the last periodic save is made again.
        refused = commit is not None and commit.refused and not commit.mute
        if commit is not None and refused and commit.is_of(*rank.round) and whole:
            self._break(
                f"I2: {rank.pod.name} trains step {step} of round {rank.round[1]},"
                f" which ends without a save: {commit.reason}"
            )
        self._forget_end(rank.round)
        ended_at = self._ended_at.get(rank.round)
        if ended_at is not None and step > ended_at:
            self._break(
                f"I3: {rank.pod.name} trains step {step} of round {rank.round[1]},"
                f" from which somebody was let go after {ended_at}"
            )

    def _forget_end(self, round: RoundId) -> None:
        """Forget the end of a round that neither the store nor any sidecar knows of any more."""
        alive = [pod.sidecar for pod in self._job.pods.values() if pod.sidecar is not None]
        if round in self._ends_lost and not any(one in alive for one in self._ends_shown[round]):
            del self._ended_at[round]
            self._ends_lost.discard(round)
