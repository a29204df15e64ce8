# SPDX-License-Identifier: Apache-2.0
"""The gate that a sidecar shows its ranks, and its votes and acknowledgements for them: pure.

The order is what makes it safe: the gate is written, *then* progress is read, *then* a vote or an
acknowledgement is sent. ``local`` returns the next of these alone. The commit that ends its round
is remembered beside the store: launchers may have been told of the grant, and a rank that trained
on would lose its steps. A store that was restored to before the grant knows nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeGuard

from rdzv.dataclass import dataclass
from rdzv.drain.inputs import LiveRound
from rdzv.drain.saves import Said, agreed, difference, left_to_others, samples_of
from rdzv.drain.standing import granted
from rdzv.records.codec import Seconds, decode, encode, load_record
from rdzv.records.drain import Commit, Drain, LastCommit, Phase, Vote
from rdzv.records.progress import RankProgress
from rdzv.snapshot import Snapshot

REASON_CHARACTERS = 500
"""Maximum length of a gate's reason: the page has a fixed size."""

ON_CUT_S = 60.0
"""Seconds without a lease after which ranks wait for one, if the job says ``--on-cut=hold``: others
keep a world for that long that vanished as a whole."""

WAITS: tuple[Phase, ...] = ("hold", "commit", "done")
"""Phases in which ranks may wait for the store."""

_OF_ALL_VERSIONS = ("epoch", "run", "round", "master", "phase", "leaving", "granted", "reason")


@dataclass(frozen=True, slots=True)
class Gate:
    """The state that the ranks of one pod read at each step boundary."""

    epoch: int = 0
    """The epoch of the commit."""
    run: str = ""
    round: int = -1
    """The round that the gate is for; -1 before the first."""
    master: str = ""
    """The name of the round to its ranks (``LiveRound.master``)."""
    phase: Phase = "idle"
    """The phase of the commit; ``hold`` also if ``ending``."""
    step: int | None = None
    """The commit step, once it is known."""
    leaving: bool = False
    """Whether this pod drains."""
    granted: bool = False
    """Whether its leave is granted."""
    deadline_boot_s: Seconds | None = None
    """The CLOCK_BOOTTIME at which SIGTERM is passed at the latest; None without a drain or a
    deadline."""
    reason: str = ""
    """The reason, in one sentence."""
    last_commit: LastCommit | None = None
    of_former_life: bool = False
    """Whether ``last_commit`` is of an earlier job of this name that was deleted."""
    ended: bool = False
    """Whether the run ended by success after this pod's leave was granted."""
    ask: int = 0
    """The number that names the drain of a central launcher for which a rank is to save; 0 without
    one."""
    ending: bool = False
    """Whether the round is about to end without a save, as a rank takes no part in commits."""
    cut: bool = False
    """Whether ranks that wait give the epoch up, as the store takes no writes."""
    on_cut: bool = False
    """Whether the ranks wait because their pod has no lease; ``phase`` is hold. No epoch depends on
    it, and the sidecar opens it by itself."""

    def to_json(self) -> bytes:
        """Encode the gate for the run directory."""
        return encode(self, last_commit=self.last_commit and _shown(self.last_commit))

    @classmethod
    def from_json(cls, name: str, content: bytes) -> Self:
        """Decode a gate; raise ``RecordError`` naming the file if it is malformed."""
        return decode(cls, name, load_record(name, content), _OF_ALL_VERSIONS)


def _shown(last: LastCommit) -> dict[str, Any]:
    """Return what the ranks are shown of the last commit."""
    return {one: getattr(last, one) for one in ("step", "round", "epoch", "cursor", "tag")}


@dataclass(frozen=True, slots=True)
class Here:
    """The local inputs of a sidecar's decision about its gate."""

    member: str
    pod_uid: str
    shown: Gate | None
    """The gate that the page shows; None if it shows none."""
    ranks: tuple[RankProgress, ...]
    """The progress of the ranks, read after ``shown`` was written."""
    cut: bool = False
    """Whether the store has answered no write for too long while ranks wait."""
    leaseless_s: float = 0.0
    """Seconds since the lease of the pod's registration ended; 0 while it has one."""
    deadline_boot_s: float | None = None
    """As in ``Gate``."""
    page_alone: bool = False
    """Whether ``gate.json`` shows another gate than the page, as it cannot be written."""
    refused: bool = False
    """Whether the page has refused the last write."""


@dataclass(frozen=True, slots=True)
class Move:
    """The next thing to do; at most one of ``gate`` and ``vote`` is not None."""

    gate: Gate | None = None
    """The gate to write."""
    vote: Vote | None = None
    """The vote to create if there is none, or to overwrite with the acknowledgement."""
    reason: str = ""
    """The reason, in one sentence."""


def local(
    here: Here,
    *,
    commit: Commit | None,
    round: LiveRound | None,
    drain: Drain | None,
    vote: Vote | None,
    last_commit: LastCommit | None,
    on_cut_s: float = math.inf,
    of_former_life: bool = False,
    ask: int = 0,
) -> Move:
    """Return the next step: write the gate, vote, or acknowledge.

    ``commit``, ``round``, ``drain`` (this pod's), ``vote`` (this member's, as stored) and
    ``last_commit`` (``of_former_life`` and ``ask``: as in ``Gate``) are as last read from the
    store; without a ``round`` the gate is not changed, but for ``ask``, ``cut`` and ``on_cut``.
    ``on_cut_s``: the time without a lease after which ranks wait for one; infinite: they train on.
    """
    wanted = _wanted(here, commit, round, drain, last_commit, of_former_life)
    wanted = held_on_cut(replace(wanted, ask=ask), here.shown, here.leaseless_s, on_cut_s)
    if wanted != here.shown:
        if here.refused and wanted.phase == "commit" and _is_pending(vote, here, wanted.epoch):
            return _unasked(vote)
        return Move(gate=wanted, reason=f"the gate is {wanted.phase}: {wanted.reason}")
    if commit is None or round is None or not round.live:
        return Move(reason=f"the gate stays {wanted.phase}")
    if not commit.is_of(round.run, round.number):
        return Move(reason=f"the gate stays {wanted.phase}")
    # Until a write is answered, a rank may be giving up what it has acknowledged.
    if here.cut or here.member not in round.members:
        return Move(reason="this pod takes no part in it")
    if commit.phase == "hold" and (vote is None or vote.epoch != commit.epoch):
        return _vote(here, commit, round)
    if wanted.phase == "commit" and vote is not None and vote.epoch == commit.epoch:
        if drain is not None and drain.outcome:
            return Move(reason=f"this pod may go: {drain.outcome}")
        return _acknowledge(here, commit, round, vote)
    return Move(reason=f"the gate stays {wanted.phase}")


def _wanted(
    here: Here,
    commit: Commit | None,
    round: LiveRound | None,
    drain: Drain | None,
    last_commit: LastCommit | None,
    of_former_life: bool,
) -> Gate:
    """Return the gate that should be shown."""
    if round is None:
        wanted = here.shown or Gate()
        if wanted.on_cut:
            wanted = replace(wanted, phase="idle", on_cut=False, reason="")
    else:
        let_go = drain is not None and granted(commit, drain)
        if last_commit is not None and not last_commit.is_of(round.run):
            last_commit = None
        wanted = Gate(
            epoch=commit.epoch if commit else 0,
            run=round.run,
            round=round.number,
            master=round.master if round.complete else "",
            leaving=drain is not None,
            granted=let_go,
            ended=let_go and round.succeeded,
            deadline_boot_s=here.deadline_boot_s if drain is not None else None,
            last_commit=last_commit and LastCommit(**_shown(last_commit)),
            of_former_life=of_former_life,
        )
        if commit is not None and round.live and commit.is_of(round.run, round.number):
            reason = commit.reason[:REASON_CHARACTERS]
            wanted = replace(wanted, phase=commit.phase, step=commit.step, reason=reason)
            if commit.refused and not round.finishing:
                # The round is about to end without a save: a step that began now would be lost.
                wanted = replace(wanted, phase="hold", ending=True)
    return replace(wanted, cut=here.cut and wanted.phase in WAITS)


def held_on_cut(wanted: Gate, shown: Gate | None, leaseless_s: float, on_cut_s: float) -> Gate:
    """Return the gate that holds ranks which would train on without a lease for too long.

    Others may form a world without this pod from then on. Once held, they wait for a lease.
    """
    if not leaseless_s:
        return wanted
    held = shown is not None and shown.on_cut
    opens = wanted.cut or wanted.phase in ("idle", "void")
    if not held and not (opens and leaseless_s >= on_cut_s):
        return wanted
    why = "this pod has no lease in the store, so that others may train without it: its ranks wait"
    held_gate = replace(wanted, phase="hold", step=None, cut=False, ending=False)
    return replace(held_gate, on_cut=True, reason=why)


def _of_round(here: Here, round: LiveRound) -> Sequence[RankProgress]:
    """Return this pod's ranks if all of them take part in this round; else none."""
    ranks = [r for r in here.ranks if (r.drain or r.away) and r.master == round.master]
    complete = all(rank.local_world_size == len(ranks) for rank in ranks)
    return ranks if complete and round.master else ()


def _vote(here: Here, commit: Commit, round: LiveRound) -> Move:
    if _reads_no_gate(here, round):
        return Move(reason="a rank reads gate.json alone, which cannot be written")
    ranks = _of_round(here, round)
    if any(rank.failed and rank.failed[0] == commit.epoch for rank in ranks):
        return Move(reason=f"a rank of this pod has given epoch {commit.epoch} up")
    first_free = max((r.step if r.held else r.step + 1 for r in ranks), default=None)
    says = "no: a rank takes no part" if first_free is None else f"step {first_free}"
    away = any(rank.away for rank in ranks)
    if away:
        says += ", which comes when its ranks are back in muster.drain()"
    return Move(
        vote=Vote(commit.epoch, commit.round, here.pod_uid, first_free, away=away),
        reason=f"votes in epoch {commit.epoch}: {says}",
    )


def _unasked(vote: Vote) -> Move:
    """Fail the save of a pod whose ranks are never asked for it: the other ranks wait for it."""
    why = "its run directory takes no writes"
    return Move(vote=replace(vote, failed=why), reason=f"the save fails: {why}")


def _reads_no_gate(here: Here, round: LiveRound) -> bool:
    """Return whether a rank reads ``gate.json`` alone, which cannot be written."""
    return here.page_alone and not all(
        rank.page for rank in here.ranks if rank.master == round.master
    )


def _is_pending(vote: Vote | None, here: Here, epoch: int) -> TypeGuard[Vote]:
    """Return whether this pod has voted in ``epoch``, and not yet said what became of its save."""
    if vote is None or (vote.epoch, vote.pod_uid) != (epoch, here.pod_uid):
        return False
    return vote.acked is None and not vote.failed


def _acknowledge(here: Here, commit: Commit, round: LiveRound, vote: Vote) -> Move:
    if not _is_pending(vote, here, commit.epoch):
        return Move(reason="this pod has said what became of its save")
    ranks = _of_round(here, round)
    failures = (_failure(r, commit.epoch) for r in here.ranks if r.master == round.master)
    failed = [why for why in failures if why is not None]
    saved = [r.acked[1] for r in ranks if r.acked and r.acked[0] == commit.epoch]
    if failed:
        why = failed[0]
        return Move(vote=replace(vote, failed=why), reason=f"the save failed: {why}")
    if not ranks or len(saved) < len(ranks):
        if _reads_no_gate(here, round):
            return _unasked(vote)
        return Move(reason=f"{len(saved)} ranks of this pod have saved")
    if len(set(saved)) > 1:
        why = f"the ranks of {here.member} saved different steps: {sorted(set(saved))}"
        return Move(vote=replace(vote, failed=why), reason=why)
    step = saved[0]
    said = [Said.by(r, step, here.member) for r in ranks]
    if differ := difference(step, said):
        return Move(vote=replace(vote, failed=differ), reason=differ)
    acknowledged = replace(
        vote,
        acked=step,
        cursor=agreed(one.cursor for one in said),
        ranks=tuple(sorted(r.rank for r in ranks)),
        tag=agreed(r.tag for r in ranks),
        samples=samples_of(r.samples for r in ranks),
    )
    return Move(vote=acknowledged, reason=f"all ranks saved step {step}{left_to_others(said)}")


def _failure(rank: RankProgress, epoch: int) -> str | None:
    """Return why this rank will not acknowledge any more, or None if it may."""
    if rank.failed and rank.failed[0] == epoch:
        return rank.failed[1] or "it did not say why"
    takes_part = rank.drain or rank.away
    if not takes_part and not (rank.acked and rank.acked[0] == epoch):
        return f"local rank {rank.local_rank} has left its training loop"
    return None


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
