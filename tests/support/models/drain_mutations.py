# SPDX-License-Identifier: Apache-2.0
"""The drain protocol with one rule left out at a time; each must be found by the exploration.

A mutation is what the model has instead of one of its functions or switches; ``PLANTED`` says under
which rules it is looked for, from where on, and by which words it is found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from launcher_shim.c10d.rounds import inputs
from muster import boundary
from rdzv.drain import decision as draining
from rdzv.drain import gate, transactions
from rdzv.drain.decision import DrainDecision
from rdzv.drain.gate import Here, Move
from rdzv.drain.inputs import DrainingSnapshot as Seen
from rdzv.drain.inputs import DrainObservations as Times
from rdzv.drain.inputs import DrainPolicy, LiveRound
from rdzv.drain.transactions import vote_transaction
from rdzv.keys import GenerationKeys, JobKeys
from rdzv.records.drain import Commit, Drain, Vote
from rdzv.snapshot import NO_ROUND, Listing, Places, Snapshot, listing_of
from rdzv.store import Compare, Delete, Operation
from tests.support.models.drains import (
    ALL_THREE_SAVE,
    GENERATION,
    OTHERS_STILL_SAVE,
    OUT_OF_TIME,
    ROUND_KEY,
    Fault,
    Rules,
)

Transaction = tuple[list[Compare], list[Operation]]
Verdict = tuple[str, boundary.Rank]

# --- what a sidecar and its ranks do ---


def opens_after_sending(here: Here, **store: Any) -> Move:
    """A sidecar that is cut off lets its rank go as if there had been no hold."""
    if here.shown is not None and here.shown.phase == "hold" and here.cut:
        return Move(gate=replace(here.shown, phase="void"))
    if here.shown is not None and here.shown.phase == "void" and here.cut:
        return Move()
    return gate.local(here, **store)


def waits_for_the_store_without_end(here: Here, **store: Any) -> Move:
    """The gate is not marked cut."""
    return gate.local(replace(here, cut=False), **store)


def saved_is_saved(here: Here, **store: Any) -> Move:
    """A save is acknowledged although the rank has given the epoch up since."""
    ranks = tuple(replace(rank, failed=None) if rank.acked else rank for rank in here.ranks)
    return gate.local(replace(here, ranks=ranks), **store)


def gives_up_without_a_word(rank: boundary.Rank, read: boundary.RankGate | None) -> Verdict:
    """A rank trains on before its file says that it has given the epoch up."""
    verdict, after = boundary.decide(rank, read)
    if verdict == boundary.PUBLISH and after.failed != rank.failed:
        return boundary.GO, after
    return verdict, after


def votes_for_the_highest_boundary(here: Here, **store: Any) -> Move:
    """A vote names the boundary where the rank was, not one more."""
    ranks = tuple(replace(rank, held=True) for rank in here.ranks)
    return gate.local(replace(here, ranks=ranks), **store)


def refused_ranks_go_on(here: Here, **store: Any) -> Move:
    """The gate is open while a leave is granted without a save."""
    commit = store["commit"]
    if commit is not None and commit.refused:
        store = {**store, "commit": replace(commit, refused=False)}
    return gate.local(here, **store)


def held_while_finishing(here: Here, **store: Any) -> Move:
    """A leave without a save holds the ranks of a world that is about to finish, too."""
    commit, round = store["commit"], store["round"]
    if commit is not None and commit.refused and round is not None:
        store = {**store, "round": replace(round, finishing=False)}
    return gate.local(here, **store)


def away_takes_no_part(here: Here, **store: Any) -> Move:
    """A rank that has left its loop is taken for one that never takes part."""
    ranks = tuple(replace(rank, away=False) for rank in here.ranks)
    return gate.local(replace(here, ranks=ranks), **store)


def away_has_failed(here: Here, **store: Any) -> Move:
    """A rank that has left its loop is taken for one that will not save any more."""
    if store["vote"] is None:
        return gate.local(here, **store)
    return away_takes_no_part(here, **store)


def away_has_passed_nothing(here: Here, **store: Any) -> Move:
    """A rank that has left its loop votes for its last boundary, not one more."""
    ranks = tuple(replace(rank, held=rank.held or rank.away) for rank in here.ranks)
    return gate.local(replace(here, ranks=ranks), **store)


def held_not_taken_back(rank: boundary.Rank, read: boundary.RankGate | None) -> Verdict:
    """A rank goes on while its progress still says that it is held."""
    verdict, after = boundary.decide(rank, read)
    if verdict == boundary.PUBLISH and not after.held:
        return boundary.GO, rank
    return verdict, after


def later_round_opens_the_gate(rank: boundary.Rank, read: boundary.RankGate | None) -> Verdict:
    """A rank that is parked goes on when its gate speaks of a later round."""
    return boundary.decide(rank._replace(matched=False), read)


def earlier_gate_obeyed(rank: boundary.Rank, read: boundary.RankGate | None) -> Verdict:
    """A rank obeys whatever gate it finds."""
    return boundary.decide(rank, read and read._replace(master=rank.master))


# --- what is decided on the store ---


def only_who_can_be_reached(
    now: float, seen: Seen, times: Times, policy: DrainPolicy
) -> DrainDecision:
    """Those who do not answer in time are not waited for."""
    decision = draining.decide(now, seen, times, policy)
    commit, live = seen.commit, seen.round
    if decision.commit is None or live is None or decision.commit.phase != "void":
        return decision
    if commit.phase == "hold" and now - times.since_s >= policy.hold_s and seen.votes:
        return draining.decide(now, replace(seen, round=_voters(seen, live)), times, policy)
    return decision


def only_voters_save(now: float, seen: Seen, times: Times, policy: DrainPolicy) -> DrainDecision:
    """And a save is done once all of those have acknowledged it."""
    if seen.round is not None and seen.commit.phase == "commit":
        return draining.decide(now, replace(seen, round=_voters(seen, seen.round)), times, policy)
    return only_who_can_be_reached(now, seen, times, policy)


def _voters(seen: Seen, live: LiveRound) -> LiveRound:
    return replace(live, members=tuple(m for m in live.members if m in seen.votes))


def done_goes_back_after_a_grant(
    now: float, seen: Seen, times: Times, policy: DrainPolicy
) -> DrainDecision:
    """Training goes on after a while, although somebody was let go."""
    decision = draining.decide(now, seen, times, policy)
    over = now - times.since_s >= policy.done_s
    same = seen.round is not None and seen.commit.round == seen.round.number
    if seen.commit.phase == "done" and same and over and decision.commit is None:
        return DrainDecision(replace(seen.commit, phase="idle"))
    return decision


def kept_for_a_replacement_that_cannot_come(
    now: float, seen: Seen, times: Times, policy: DrainPolicy
) -> DrainDecision:
    """Below min a leaver is kept, though all others leave, too, or it makes room."""
    with patch.object(draining._Scene, "is_last_world", property(lambda scene: False)):
        return draining.decide(now, seen, times, policy)


def commit_never_void(now: float, seen: Seen, times: Times, policy: DrainPolicy) -> DrainDecision:
    """A save that fails, or that nobody needs any more, is waited for all the same."""
    decision = draining.decide(now, seen, times, policy)
    if seen.commit.phase == "commit" and decision.commit and decision.commit.phase == "void":
        return DrainDecision()
    return decision


def done_before_all_have_saved(
    now: float, seen: Seen, times: Times, policy: DrainPolicy
) -> DrainDecision:
    """The first acknowledgement is taken for all."""
    saved = {m: vote for m, vote in seen.votes.items() if vote.acked is not None}
    if seen.commit.phase == "commit" and seen.round is not None and saved:
        seen = replace(seen, round=replace(seen.round, members=tuple(saved)))
    return draining.decide(now, seen, times, policy)


def acknowledgements_not_compared(
    now: float, seen: Seen, times: Times, policy: DrainPolicy
) -> DrainDecision:
    """Ranks may have saved different steps."""
    saved = [vote.acked for vote in seen.votes.values() if vote.acked is not None]
    if seen.commit.phase == "commit" and seen.round and len(saved) == len(seen.round.members):
        votes = {m: replace(vote, acked=saved[0]) for m, vote in seen.votes.items()}
        seen = replace(seen, votes=votes)
    return draining.decide(now, seen, times, policy)


def cursors_not_compared(
    now: float, seen: Seen, times: Times, policy: DrainPolicy
) -> DrainDecision:
    """Pods may stand at different places in the data; the cursor of one is taken."""
    given = [vote.cursor for vote in seen.votes.values() if vote.cursor]
    votes = {m: replace(vote, cursor=given[0] if given else "") for m, vote in seen.votes.items()}
    return draining.decide(now, replace(seen, votes=votes), times, policy)


def cursor_of_the_first(now: float, seen: Seen, times: Times, policy: DrainPolicy) -> DrainDecision:
    """What the first pod gives is put on record, also where only another one gave a cursor."""
    decision = draining.decide(now, seen, times, policy)
    if decision.last_commit is None or seen.round is None:
        return decision
    first = seen.votes[seen.round.members[0]].cursor
    return replace(decision, last_commit=replace(decision.last_commit, cursor=first))


def one_rank_speaks_for_its_pod(here: Here, **store: Any) -> Move:
    """The cursor of a pod is that of its first rank, whatever the others give."""
    ranks = tuple(replace(rank, cursors=here.ranks[0].cursors) for rank in here.ranks)
    return gate.local(replace(here, ranks=ranks), **store)


def deadline_of_a_saver_ends_the_save(
    now: float, seen: Seen, times: Times, policy: DrainPolicy
) -> DrainDecision:
    """A leaver that is out of time goes without a commit, although it has saved."""
    decision = draining.decide(now, seen, times, policy)
    if seen.commit.phase != "commit":
        return decision
    late = {
        uid: replace(drain, outcome="expired")
        for uid, drain in seen.membership.drains.items()
        if not drain.outcome and now >= times.due_s[uid]
    }
    return replace(decision, drains={**late, **decision.drains})


def save_without_a_limit(
    now: float, seen: Seen, times: Times, policy: DrainPolicy
) -> DrainDecision:
    """The others may save for as long as they like, once no deadline ends that any more."""
    return draining.decide(now, seen, times, replace(policy, save_s=math.inf))


def refusal_sticks(now: float, seen: Seen, times: Times, policy: DrainPolicy) -> DrainDecision:
    """Once a rank took no part, whoever leaves later in this round goes without a save, too."""
    if seen.commit.refused:
        everybody = replace(seen.commit, leaving=tuple(seen.membership.drains))
        seen = replace(seen, membership=replace(seen.membership, commit=everybody))
    return draining.decide(now, seen, times, policy)


def away_for_ever(now: float, seen: Seen, times: Times, policy: DrainPolicy) -> DrainDecision:
    """Newcomers wait for a save by ranks that do not come back to their loops."""
    votes = {member: replace(vote, away=False) for member, vote in seen.votes.items()}
    return draining.decide(now, replace(seen, votes=votes), times, policy)


def refusal_opens_the_door(membership: Snapshot, listed: Listing, run: str, number: int) -> bool:
    """Once a rank took no part, whoever comes later in this round is let in without a save."""
    commit = membership.commit
    refused = commit is not None and commit.refused and commit.round == number
    return not refused and inputs.joins_wait(membership, listed, run, number)


def nothing_ends_the_round(membership: Snapshot, run: str, number: int) -> bool:
    """Who was to be let in has vanished, and so nobody leaves the round."""
    return False


def nobody_has_saved(
    membership: Snapshot, votes: Mapping[str, Vote], run: str, number: int
) -> Mapping[str, str]:
    """Whoever is gone ends the round, also a leaver that has saved while others still do."""
    return {}


def listing_ignores_drains(snapshot: Snapshot, places: Places = NO_ROUND) -> Listing:
    """Who drains is listed like everybody."""
    return listing_of(replace(snapshot, drains={}), places)


# --- what is compared ---


def _written(keys: JobKeys, seen: Seen, decision: DrainDecision, *, prefix: str) -> Transaction:
    compares, operations = transactions.transaction(keys, seen, decision)
    return [c for c in compares if c.prefix or not c.key.startswith(prefix)], operations


def round_not_compared(keys: JobKeys, seen: Seen, decision: DrainDecision) -> Transaction:
    """A change of the commit does not ask whether the round is still the same."""
    return _written(keys, seen, decision, prefix=ROUND_KEY)


def own_drain_not_compared(keys: JobKeys, seen: Seen, decision: DrainDecision) -> Transaction:
    """A grant does not look at the drain."""
    return _written(keys, seen, decision, prefix=GENERATION.drains)


def given_up_unheard(keys: JobKeys, seen: Seen, decision: DrainDecision) -> Transaction:
    """Who ends a drain at its deadline does not ask whether the leaver has saved since."""
    return _written(keys, seen, decision, prefix=GENERATION.votes)


def saved_after_all(
    keys: GenerationKeys, member: str, vote: Vote, commit: Commit, drain: Drain | None
) -> Transaction:
    """An acknowledgement does not ask whether its pod has been given up since."""
    compares, operations = vote_transaction(keys, member, vote, commit, drain)
    return [one for one in compares if not one.key.startswith(keys.drains)], operations


def min_from_a_stale_snapshot(keys: JobKeys, seen: Seen, decision: DrainDecision) -> Transaction:
    """A grant does not ask whether another drain has come since."""
    compares, operations = transactions.transaction(keys, seen, decision)
    return [compare for compare in compares if not compare.prefix], operations


def cancel_without_the_commit(
    keys: JobKeys, membership: Snapshot, pod_uid: str
) -> Transaction | str:
    """A cancel does not touch the commit."""
    made = transactions.cancel(keys, membership, pod_uid)
    if isinstance(made, str):
        return made
    return made[0], [operation for operation in made[1] if isinstance(operation, Delete)]


# --- where each is looked for ---

BOTH_HELD_AND_VOID = (
    *("rank 0 at 0 goes", "rank 1 at 0 goes", "rank 0 arrives", "rank 1 arrives", "notice for 0"),
    *("0 hears", "0 writes hold", "0 hears", "0 shows hold", "1 hears", "1 shows hold"),
    *("rank 0 at 1 reads: publish", "rank 0 at 1 publishes", "rank 1 at 1 reads: publish"),
    *("rank 1 at 1 publishes", "(early) (time) 0 writes void", "0 hears", "0 shows void"),
)
"""Both ranks are held at boundary 1, the hold has come to nothing, and pod 0 knows."""


@dataclass(frozen=True)
class Planted:
    """A mutation, the ``rules`` under which it breaks something, and what is said then.

    ``labels``: steps after which the search begins.
    """

    mutation: dict[str, Any]
    rules: Rules
    found: str
    labels: tuple[str, ...] = ()


def _only(*faults: Fault, **changes: Any) -> Rules:
    return Rules(faults=faults, fault_count=1, **changes)


def _decides(function: Any, rules: Rules, found: str, *labels: str) -> Planted:
    return Planted({"draining_decide": function}, rules, found, labels)


def _local(function: Any, rules: Rules, found: str) -> Planted:
    return Planted({"gate_local": function}, rules, found)


def _rank(function: Any, rules: Rules, found: str, *labels: str) -> Planted:
    return Planted({"boundary_decide": function}, rules, found, labels)


def _writes(function: Any, rules: Rules, found: str, *labels: str, **also: Any) -> Planted:
    return Planted({"transaction": function, **also}, rules, found, labels)


HELD = Rules(hurry=2)
LATE = Rules(boundaries=1, hurry=2)
STARTING = Rules(begun=False, boundaries=2, notices=(0, 1), hurry=1)
LOOPS = Rules(boundaries=4, block=2, hurry=1)
CUT_SHORT = "cut short by who has saved"
BELOW = "released below min"
NONE_CAN_COME = "no replacement can come"
AFTER_GRANT = "is trained by 0 after its grant"

PLANTED = {
    "a sidecar lets its rank go after sending its vote": _local(
        opens_after_sending, Rules(faults=("cut",), fault_count=2), "runs past step"
    ),
    "ranks wait without end for a store that takes no writes": _local(
        waits_for_the_store_without_end, _only("full"), "takes no writes"
    ),
    "an epoch is acknowledged that a rank has given up": _local(
        saved_is_saved, _only("full"), "that its rank has given up"
    ),
    "a sidecar that starts again does not know what its rank has given up": Planted(
        {"failed_forgotten_at_start": True}, Rules(faults=("full", "crash"), fault_count=2), "I"
    ),
    "i3 a rank trains on before its file says that it has given up": _rank(
        gives_up_without_a_word, _only("full"), "I3"
    ),
    "a held flag is not taken back": _rank(
        held_not_taken_back, HELD, "past step", *BOTH_HELD_AND_VOID
    ),
    "a held flag is cleared without reading the gate again": Planted(
        {"gate_read_again": False}, HELD, "past step", BOTH_HELD_AND_VOID
    ),
    "a change of the commit does not compare the round": _writes(
        round_not_compared, _only("rank", hurry=1), "I", *OTHERS_STILL_SAVE
    ),
    "a sidecar clears the gate when it starts": Planted(
        {"gate_cleared_at_start": True}, _only("crash"), "a rank of"
    ),
    "i3 all means all that can be reached": _decides(
        only_who_can_be_reached, _only("cut", hurry=2), "I3"
    ),
    "i3 all that save means all that have voted": _decides(
        only_voters_save, _only("cut", hurry=2), "I3"
    ),
    "done goes back to idle after a grant": _decides(
        done_goes_back_after_a_grant, Rules(hurry=1), AFTER_GRANT
    ),
    "a new round opens the gate of a parked leaver": _rank(
        later_round_opens_the_gate, Rules(), "after its grant"
    ),
    "a commit has no way to void": _decides(
        commit_never_void, _only("fail", cancels=1), "waits for ever"
    ),
    "a cancel is on another key": _writes(
        own_drain_not_compared,
        Rules(cancels=1, boundaries=2),
        "a cancelled drain of 0 is released",
        cancel=cancel_without_the_commit,
    ),
    "i10 min is judged from a stale snapshot": _writes(
        min_from_a_stale_snapshot,
        replace(LATE, members=3, least=2, notices=(0, 1)),
        BELOW,
        *ALL_THREE_SAVE,
    ),
    "i10 all drain, and each is kept for a replacement": _decides(
        kept_for_a_replacement_that_cannot_come, Rules(notices=(0, 1), hurry=2), NONE_CAN_COME
    ),
    "i10 a pod that makes room is kept for a replacement": _decides(
        kept_for_a_replacement_that_cannot_come,
        Rules(least=2, preempted=(0,), hurry=2),
        NONE_CAN_COME,
    ),
    "a gate of another round is obeyed": _rank(earlier_gate_obeyed, Rules(), "after its grant"),
    "i3 the gate is read before publishing": Planted(
        {"gate_before_publishing": True}, Rules(), "I3"
    ),
    "i3 progress is read before the gate is written": Planted(
        {"progress_before_gate": True}, Rules(), "I3"
    ),
    "i3 a vote names the highest boundary instead of one more": _local(
        votes_for_the_highest_boundary, Rules(), "I3"
    ),
    "i7 done before all have acknowledged": _decides(done_before_all_have_saved, Rules(), "I7"),
    "i7 acknowledgements are not compared": _decides(
        acknowledgements_not_compared, Rules(strides=(1, 2), boundaries=6, lockstep=False), "I7"
    ),
    "i12 cursors of two pods are not compared": _decides(
        cursors_not_compared, Rules(cursors=("a", "b")), "I12"
    ),
    "i12 the cursor is taken of a pod that gave none": _decides(
        cursor_of_the_first, Rules(cursors=("", "b")), "I12"
    ),
    "i12 cursors of the ranks of one pod are not compared": _local(
        one_rank_speaks_for_its_pod, Rules(members=1, ranks=2, cursors=("a", "b")), "I12"
    ),
    "others wait for a leaver when their round is lost": Planted(
        {"leavers_are_excused": False}, _only("rank", deadlines=False), "waits for ever"
    ),
    "i7 the loss of a leaver that has saved ends the save of the others": Planted(
        {"savers": nobody_has_saved}, LATE, CUT_SHORT, OUT_OF_TIME
    ),
    "i7 the deadline of a leaver that has saved ends the save of the others": _decides(
        deadline_of_a_saver_ends_the_save, LATE, CUT_SHORT, *OUT_OF_TIME
    ),
    "i7 a leaver is given up by who has not heard that it saved": _writes(
        given_up_unheard, LATE, CUT_SHORT, *OTHERS_STILL_SAVE[:-1]
    ),
    "i7 a leaver that was given up is taken for one that has saved": Planted(
        {"vote_transaction": saved_after_all}, replace(LATE, members=3), CUT_SHORT, ALL_THREE_SAVE
    ),
    "a save without a limit never returns": _decides(
        save_without_a_limit, _only("stuck", boundaries=1, hurry=2), "waits for ever", *OUT_OF_TIME
    ),
    "i3 entering a loop is taken for the first boundary": Planted(
        {"entering_forgets": True}, replace(LOOPS, lockstep=False), "I3"
    ),
    "a rank between two loops is taken for one that takes no part": _local(
        away_takes_no_part, LOOPS, "says that they do not"
    ),
    "a rank between two loops is taken for a save that failed": _local(
        away_has_failed, LOOPS, "gives that up"
    ),
    "i3 a rank between two loops votes for its last boundary": _local(
        away_has_passed_nothing, LOOPS, "I3"
    ),
    "a refusal sticks to the round": _decides(
        refusal_sticks,
        Rules(notices=(0, 1), outsider=1, cancels=1, hurry=1),
        "goes without a save that nobody was asked for",
    ),
    "a refusal lets later newcomers in": Planted(
        {"joins_wait": refusal_opens_the_door},
        Rules(joiners=1, outsider=1, cancels=1),
        "newcomers are let in",
    ),
    "i2 a rank begins a step in a world that is about to end without a save": Planted(
        {"gate_local": refused_ranks_go_on}, STARTING, "I2"
    ),
    "i2 a rank begins its first step while the others are held": Planted(
        {"waits_to_begin": False}, STARTING, "I2"
    ),
    "a rank is held in a world that finishes": _local(
        held_while_finishing, Rules(outsider=1, joiners=1, hurry=1), "waits for ever"
    ),
    "newcomers wait for ranks that never come back to a loop": _decides(
        away_for_ever, _only("stay", joiners=1, boundaries=4, block=1, notices=()), "no end"
    ),
    "i2 a listing ignores drains": Planted(
        {"listing_decide": listing_ignores_drains}, Rules(notices=(0, 1)), "I2"
    ),
}
