# SPDX-License-Identifier: Apache-2.0
"""The commit that ends its round, remembered beside the store: pure.

Once a leave or a join is granted, launchers may have been told of it, and a rank that trained on
would lose its steps. A store that was restored to before the grant knows nothing of it: the gate
stays shut then, and the record is put back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rdzv.dataclass import dataclass
from rdzv.drain.inputs import LiveRound
from rdzv.records.commit import Commit, LastCommit
from rdzv.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class RoundEnding:
    """The commit after which ``round`` ends, as this sidecar has seen it in ``generation``.

    ``last_commit`` is the save that it rests on; None if another one was on record by then.
    """

    generation: int
    round: LiveRound
    commit: Commit
    last_commit: LastCommit | None

    def put_back_into(
        self, membership: Snapshot, rounds: Iterable[LiveRound]
    ) -> tuple[Commit, LastCommit | None] | None:
        """Return the records to put back, or None if the store has not lost the ending.

        The epoch is never below that of an attempt which the restored store has begun since. No
        leave counts as granted, as the store has lost its drain, or how that ended: whoever has
        not gone is granted it anew. The last commit is left out if the store has that one, or a
        later one. A world that has saved a later step has trained on: its ending is over.
        """
        if membership.job is None or membership.job.generation != self.generation:
            return None
        if not any(_is_same(one, self.round) for one in rounds):
            return None
        stored, last = membership.commit, membership.last_commit
        if stored is not None and _ends(stored, self.round):
            return None
        if last is not None and self._is_before(last):
            return None
        epoch = max(self.commit.epoch, stored.epoch if stored is not None else 0)
        saved = self.last_commit
        if saved is not None and last is not None and last.epoch >= saved.epoch:
            saved = None
        return replace(self.commit, epoch=epoch, granted=(), admitted=True), saved

    def _is_before(self, last: LastCommit) -> bool:
        """Return whether ``last`` is a save of this round and of a later step."""
        ended = -1 if self.commit.step is None else self.commit.step
        return last.is_of(self.round.run) and last.round == self.round.number and last.step > ended


def ending_in(membership: Snapshot, rounds: Iterable[LiveRound]) -> RoundEnding | None:
    """Return the ending of one of ``rounds`` that is on record; None if there is none."""
    commit, last = membership.commit, membership.last_commit
    if membership.job is None or commit is None:
        return None
    for round in rounds:
        if round.live and _ends(commit, round):
            saved = last if last is not None and last.epoch == commit.epoch else None
            return RoundEnding(membership.job.generation, round, commit, saved)
    return None


def _ends(commit: Commit, round: LiveRound) -> bool:
    return commit.is_of(round.run, round.number) and (commit.admitted or bool(commit.granted))


def _is_same(one: LiveRound, seen: LiveRound) -> bool:
    """Return whether it is the same world: its number may have been given out again since."""
    same_ranks = (one.run, one.number, one.members) == (seen.run, seen.number, seen.members)
    return one.live and same_ranks and (one.master or seen.master) == (seen.master or one.master)
