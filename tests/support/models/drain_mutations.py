# SPDX-License-Identifier: Apache-2.0
"""The drain protocol with one rule left out at a time; each must be found by the exploration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muster import boundary
from rdzv import listing
from rdzv.drain import decision as draining
from rdzv.drain import gate
from rdzv.drain.decision import DrainDecision
from rdzv.drain.gate import Here, Move, RankProgress
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy
from rdzv.keys import JobKeys
from rdzv.records.commit import Vote
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, Operation
from tests.support.models.drains import GENERATION, ROUND_KEY, World

Transaction = tuple[list[Compare], list[Operation]]


class OpensAfterSending(World):
    """A sidecar that is cut off lets its rank go, although its vote was sent."""

    @staticmethod
    def gate_local(here: Here, **store: Any) -> Move:
        held = here.shown is not None and here.shown.phase == "hold"
        if here.shown is not None and held and here.cut_for_s >= store["hold_s"]:
            return Move(gate=replace(here.shown, phase="void"))
        if here.shown is not None and here.shown.phase == "void" and here.cut_for_s:
            return Move()
        return gate.local(here, **store)


class HeldNotTakenBack(World):
    """A rank goes on while its progress still says that it is held."""

    @staticmethod
    def boundary_decide(
        rank: boundary.Rank, read: boundary.RankGate | None
    ) -> tuple[str, boundary.Rank]:
        verdict, after = boundary.decide(rank, read)
        if verdict == boundary.PUBLISH and not after.held:
            return boundary.GO, rank
        return verdict, after


class HeldClearedOnly(World):
    """A rank publishes that it is no longer held, and goes without reading the gate again."""

    gate_read_again = False


class RoundNotCompared(World):
    """A change of the commit does not ask whether the round is still the same."""

    @staticmethod
    def transaction(keys: JobKeys, seen: DrainingSnapshot, decision: DrainDecision) -> Transaction:
        compares, operations = draining.transaction(keys, seen, decision)
        return [c for c in compares if c.key != ROUND_KEY], operations


class GateClearedAtStart(World):
    """A sidecar that starts opens the gate that it finds."""

    gate_cleared_at_start = True


class OnlyWhoCanBeReached(World):
    """Those who do not answer in time are not waited for."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        decision = draining.decide(now, seen, times, policy)
        commit, live = seen.commit, seen.round
        if decision.commit is None or live is None or decision.commit.phase != "void":
            return decision
        if commit.phase == "hold" and now - times.since_s >= policy.hold_s and seen.votes:
            here = replace(live, members=tuple(m for m in live.members if m in seen.votes))
            return draining.decide(now, replace(seen, round=here), times, policy)
        return decision


class OnlyVotersSave(OnlyWhoCanBeReached):
    """And a save is done once all of those have acknowledged it."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        live = seen.round
        if live is not None and seen.commit.phase == "commit":
            here = replace(live, members=tuple(m for m in live.members if m in seen.votes))
            return draining.decide(now, replace(seen, round=here), times, policy)
        return OnlyWhoCanBeReached.draining_decide(now, seen, times, policy)


class DoneGoesBackAfterAGrant(World):
    """Training goes on after a while, although somebody was let go."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        decision = draining.decide(now, seen, times, policy)
        over = now - times.since_s >= policy.done_s
        same = seen.round is not None and seen.commit.round == seen.round.number
        if seen.commit.phase == "done" and same and over and decision.commit is None:
            return DrainDecision(replace(seen.commit, phase="idle"))
        return decision


class LaterRoundOpensTheGate(World):
    """A rank that is parked goes on when its gate speaks of a later round."""

    @staticmethod
    def boundary_decide(
        rank: boundary.Rank, read: boundary.RankGate | None
    ) -> tuple[str, boundary.Rank]:
        return boundary.decide(rank._replace(matched=False), read)


class CommitNeverVoid(World):
    """A save that fails, or that nobody needs any more, is waited for all the same."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        decision = draining.decide(now, seen, times, policy)
        if seen.commit.phase == "commit" and decision.commit and decision.commit.phase == "void":
            return DrainDecision()
        return decision


class CancelOnAnotherKey(World):
    """A cancel does not touch the commit, nor does a grant look at the drain."""

    @staticmethod
    def cancel(keys: JobKeys, membership: Snapshot, pod_uid: str) -> Transaction | str:
        made = draining.cancel(keys, membership, pod_uid)
        if isinstance(made, str):
            return made
        return made[0], [operation for operation in made[1] if isinstance(operation, Delete)]

    @staticmethod
    def transaction(keys: JobKeys, seen: DrainingSnapshot, decision: DrainDecision) -> Transaction:
        compares, operations = draining.transaction(keys, seen, decision)
        own = [c for c in compares if c.prefix or not c.key.startswith(GENERATION.drains)]
        return own, operations


class MinFromAStaleSnapshot(World):
    """A grant does not ask whether another drain has come since."""

    @staticmethod
    def transaction(keys: JobKeys, seen: DrainingSnapshot, decision: DrainDecision) -> Transaction:
        compares, operations = draining.transaction(keys, seen, decision)
        return [compare for compare in compares if not compare.prefix], operations


class EarlierGateObeyed(World):
    """A rank obeys whatever gate it finds."""

    @staticmethod
    def boundary_decide(
        rank: boundary.Rank, read: boundary.RankGate | None
    ) -> tuple[str, boundary.Rank]:
        return boundary.decide(rank, read and read._replace(master=rank.master))


class GateBeforePublishing(World):
    """A rank reads the gate, publishes its boundary, and then does what it has read."""

    gate_before_publishing = True


class ProgressBeforeGate(World):
    """A sidecar votes by what it has read before it wrote the gate."""

    progress_before_gate = True


class VoteIsTheHighestBoundary(World):
    """A vote names the boundary where the rank was, not one more."""

    @staticmethod
    def gate_local(here: Here, **store: Any) -> Move:
        return gate.local(
            replace(here, ranks=tuple(replace(rank, held=True) for rank in here.ranks)), **store
        )


class DoneBeforeAllHaveSaved(World):
    """The first acknowledgement is taken for all."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        saved = {m: vote for m, vote in seen.votes.items() if vote.acked is not None}
        if seen.commit.phase == "commit" and seen.round is not None and saved:
            live = replace(seen.round, members=tuple(saved))
            return draining.decide(now, replace(seen, round=live), times, policy)
        return draining.decide(now, seen, times, policy)


class AcknowledgementsNotCompared(World):
    """Ranks may have saved different steps."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        saved = [vote.acked for vote in seen.votes.values() if vote.acked is not None]
        live = seen.round
        if seen.commit.phase == "commit" and live and len(saved) == len(live.members):
            votes = {m: replace(vote, acked=saved[0]) for m, vote in seen.votes.items()}
            return draining.decide(now, replace(seen, votes=votes), times, policy)
        return draining.decide(now, seen, times, policy)


class NeverNo(World):
    """Who takes no part does not vote."""

    @staticmethod
    def gate_local(here: Here, **store: Any) -> Move:
        move = gate.local(here, **store)
        return Move() if move.vote is not None and move.vote.vote is None else move


class LeaversNotExcused(World):
    """Who drains, and was not let go yet, is waited for by those who leave a round that is lost."""

    leavers_are_excused = False


class AdmissionDoesNotEndTheRound(World):
    """Who was to be let in has vanished, and so nobody leaves the round."""

    @staticmethod
    def ends_round(membership: Snapshot, run: str, number: int) -> bool:
        return False


class LossOfASaverEndsTheSave(World):
    """Whoever is gone ends the round, also a leaver that has saved while others still do."""

    @staticmethod
    def savers(
        membership: Snapshot, votes: Mapping[str, Vote], run: str, number: int
    ) -> Mapping[str, str]:
        return {}


class DeadlineOfASaverEndsTheSave(World):
    """A leaver that is out of time goes without a commit, although it has saved."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        decision = draining.decide(now, seen, times, policy)
        if seen.commit.phase != "commit":
            return decision
        late = {
            uid: replace(drain, outcome="expired")
            for uid, drain in seen.membership.drains.items()
            if not drain.outcome and now >= times.due_s[uid]
        }
        return replace(decision, drains={**late, **decision.drains})


class GivenUpUnheard(World):
    """Who ends a drain at its deadline does not ask whether the leaver has saved since."""

    @staticmethod
    def transaction(keys: JobKeys, seen: DrainingSnapshot, decision: DrainDecision) -> Transaction:
        compares, operations = draining.transaction(keys, seen, decision)
        return [c for c in compares if not c.key.startswith(GENERATION.votes)], operations


class SaveWithoutALimit(World):
    """The others may save for as long as they like, once no deadline ends that any more."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        return draining.decide(now, seen, times, replace(policy, save_s=math.inf))


class EnteringForgets(World):
    """Who enters another loop tells no boundary, as if it had passed none."""

    entering_forgets = True


class AwayTakesNoPart(World):
    """A rank that has left its loop is taken for one that never takes part."""

    @staticmethod
    def gate_local(here: Here, **store: Any) -> Move:
        return gate.local(replace(here, ranks=_without_away(here)), **store)


class AwayHasFailed(World):
    """A rank that has left its loop is taken for one that will not save any more."""

    @staticmethod
    def gate_local(here: Here, **store: Any) -> Move:
        if store["vote"] is None:
            return gate.local(here, **store)
        return AwayTakesNoPart.gate_local(here, **store)


class AwayHasPassedNothing(World):
    """A rank that has left its loop votes for its last boundary, not one more."""

    @staticmethod
    def gate_local(here: Here, **store: Any) -> Move:
        ranks = (replace(rank, held=rank.held or rank.away) for rank in here.ranks)
        return gate.local(replace(here, ranks=tuple(ranks)), **store)


class RefusalSticks(World):
    """Once a rank took no part, whoever leaves later in this round goes without a save, too."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        if seen.commit.refused:
            everybody = replace(seen.commit, leaving=tuple(seen.membership.drains))
            membership = replace(seen.membership, commit=everybody)
            seen = replace(seen, membership=membership)
        return draining.decide(now, seen, times, policy)


class RefusalOpensTheDoor(World):
    """Once a rank took no part, whoever comes later in this round is let in without a save."""

    @staticmethod
    def joins_wait(membership: Snapshot, listed: listing.Listing, run: str, number: int) -> bool:
        commit = membership.commit
        refused = commit is not None and commit.refused and commit.round == number
        return not refused and draining.joins_wait(membership, listed, run, number)


class AwayForEver(World):
    """Newcomers wait for a save by ranks that do not come back to their loops."""

    @staticmethod
    def draining_decide(
        now: float, seen: DrainingSnapshot, times: DrainObservations, policy: DrainPolicy
    ) -> DrainDecision:
        votes = {member: replace(vote, away=False) for member, vote in seen.votes.items()}
        return draining.decide(now, replace(seen, votes=votes), times, policy)


def _without_away(here: Here) -> tuple[RankProgress, ...]:
    return tuple(replace(rank, away=False) for rank in here.ranks)


class ListingIgnoresDrains(World):
    """Who drains is listed like everybody."""

    @staticmethod
    def listing_decide(
        snapshot: Snapshot, places: listing.Places = listing.NO_ROUND
    ) -> listing.Listing:
        return listing.decide(replace(snapshot, drains={}), places)
