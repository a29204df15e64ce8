# SPDX-License-Identifier: Apache-2.0
"""A commit that ends its round, and a store that was restored to before it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.drain.decisions import DrainView
from rdzv.drain.decision import DrainDecision, decide
from rdzv.drain.gate import Gate, Here, RoundEnding, ending_in, local
from rdzv.drain.inputs import (
    DrainingSnapshot,
    DrainObservations,
    DrainPolicy,
    LiveRound,
    LiveRounds,
)
from rdzv.records.drain import Commit, LastCommit
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.shards import Plan, PodShards, ShardWorld, Share, TrainedShards
from rdzv.shard_ledger import ShardLedger
from rdzv.snapshot import Snapshot, listing_of

ROUND = LiveRound("digits", 3, True, ("a", "b"), master="10.0.0.1:4711")
ENDS = Commit(5, "digits", 3, "done", 9, joins=True, admitted=True, mod_revision=40)
LAST = LastCommit(9, 3, 5, run="digits", mod_revision=40)
EARLIER = LastCommit(4, 2, 3, run="digits", mod_revision=20)
HELD = replace(ENDS, epoch=7, phase="hold", step=None, admitted=False)


def membership(
    commit: Commit | None, last: LastCommit | None = None, generation: int = 1
) -> Snapshot:
    return Snapshot(
        90, Job(JobPolicy(1, 4), generation=generation), commit=commit, last_commit=last
    )


def ending() -> RoundEnding:
    seen = ending_in(membership(ENDS, LAST), [ROUND])
    assert seen is not None
    return seen


@pytest.mark.parametrize(
    "commit", [None, HELD, replace(HELD, round=2), replace(ENDS, admitted=False)]
)
def test_i3_a_store_that_has_lost_an_ending_is_given_it_again(commit: Commit | None) -> None:
    put_back = ending().put_back_into(membership(commit, EARLIER), [ROUND])
    epoch = 7 if commit is not None and commit.epoch == 7 else 5
    assert put_back == (replace(ENDS, epoch=epoch), LAST)


@pytest.mark.parametrize(
    "round",
    [
        replace(ROUND, number=4),
        replace(ROUND, run="other"),
        replace(ROUND, members=("a", "c")),
        replace(ROUND, master="10.0.0.2:4711"),
        replace(ROUND, closed=True),
        replace(ROUND, complete=False),
    ],
)
def test_an_ending_is_of_one_world_alone(round: LiveRound) -> None:
    assert ending().put_back_into(membership(None), [round]) is None


def test_a_world_is_known_before_its_ranks_have_an_address() -> None:
    unnamed = replace(ROUND, master="")
    assert ending().put_back_into(membership(None), [unnamed]) is not None


def test_an_ending_is_put_back_once_and_in_its_own_life() -> None:
    assert ending().put_back_into(membership(ENDS), [ROUND]) is None
    assert ending().put_back_into(membership(None, generation=2), [ROUND]) is None


def test_i7_a_leave_that_was_granted_is_granted_anew() -> None:
    left = replace(ENDS, joins=False, admitted=False, granted=("uid-b",))
    seen = ending_in(membership(left, LAST), [ROUND])
    assert seen is not None
    assert seen.put_back_into(membership(None), [ROUND]) == (
        replace(left, granted=(), admitted=True),
        LAST,
    )


class Stored:
    """A sidecar's view of a store, and of its one world."""

    mirror = SimpleNamespace(certain_revision=90)

    def __init__(self) -> None:
        self.snapshot_now = membership(ENDS, LAST)
        self.membership = SimpleNamespace(
            snapshot=lambda: self.snapshot_now, votes=dict, saves=dict
        )

    async def caught_up(self) -> None:
        """The rounds are those of the present generation."""

    def live_rounds(self) -> LiveRounds:
        return LiveRounds(ROUND, ROUND)


async def test_i3_a_sidecar_remembers_an_ending_that_its_store_has_lost() -> None:
    """A story of the simulation finds it in one of a thousand seeds."""
    stored = cast(Any, Stored())
    view = DrainView(stored, stored, "uid-a", cast(Any, SimpleNamespace(commands=dict)))
    assert (await view.snapshot()).lost is None
    stored.snapshot_now = membership(None, EARLIER)
    assert (await view.snapshot()).lost == (ENDS, LAST)


def test_i3_a_last_commit_never_goes_back() -> None:
    anothers = replace(LAST, step=4, epoch=6, run="other")
    assert ending().put_back_into(membership(None, anothers), [ROUND]) == (ENDS, None)
    # The save was forgotten, or another run's was put on record, before the ending was seen.
    unseen = ending_in(membership(ENDS, anothers), [ROUND])
    assert unseen is not None
    assert unseen.last_commit is None


@pytest.mark.parametrize(
    "later",
    [
        replace(LAST, step=12, epoch=6),
        # As a periodic save has it, which begins no epoch.
        replace(LAST, step=12, epoch=3, periodic=True),
    ],
)
def test_i3_a_world_that_has_saved_a_later_step_is_not_ended_after_the_earlier_one(
    later: LastCommit,
) -> None:
    assert ending().put_back_into(membership(None, later), [ROUND]) is None
    assert ending().put_back_into(membership(HELD, later), [ROUND]) is None
    earlier = replace(later, round=2)
    assert ending().put_back_into(membership(None, earlier), [ROUND]) is not None


def test_a_world_that_ends_without_a_save_is_not_ended_after_one() -> None:
    unsaved = ending_in(membership(replace(ENDS, step=None), EARLIER), [ROUND])
    assert unsaved is not None
    assert unsaved.put_back_into(membership(None, EARLIER), [ROUND]) is not None
    assert unsaved.put_back_into(membership(None, replace(LAST, step=1)), [ROUND]) is None


@pytest.mark.parametrize(
    "commit", [None, HELD, replace(ENDS, admitted=False), replace(ENDS, round=2)]
)
def test_only_a_grant_in_a_live_round_is_an_ending(commit: Commit | None) -> None:
    assert ending_in(membership(commit), [ROUND]) is None
    assert ending_in(membership(ENDS), [replace(ROUND, closed=True)]) is None


def lost(*ledgers: ShardLedger) -> DrainingSnapshot:
    stored = membership(None, EARLIER)
    return DrainingSnapshot(
        stored,
        listing_of(stored),
        ROUND,
        {},
        "uid-a",
        revision=90,
        ledgers=ledgers,
        lost=(ENDS, LAST),
    )


def put_back(snapshot: DrainingSnapshot) -> DrainDecision:
    return decide(0.0, snapshot, DrainObservations(), DrainPolicy())


def test_i3_the_gate_stays_shut_until_the_ending_is_put_back() -> None:
    move = local(
        Here("a", "uid-a", Gate(), ()),
        commit=lost().commit_in_force,
        round=ROUND,
        drain=None,
        vote=None,
        last_commit=None,
    )
    assert move.gate is not None
    assert (move.gate.phase, move.gate.step) == ("done", 9)

    decision = put_back(lost())
    assert decision.commit is not None
    assert replace(decision.commit, reason="") == ENDS
    assert decision.last_commit == LAST
    assert decision.drains == {}


def test_a_save_is_not_put_back_if_the_store_has_lost_the_shards_in_it() -> None:
    world = ShardWorld("digits 3", Plan(100, 10, None), 2, 5, "digits", 3)
    pods = {name: PodShards(name, "", {0: Share(held=((0, 1),))}) for name in "ab"}
    decision = put_back(lost(ShardLedger(world, trained=TrainedShards(base=5), pods=pods)))
    assert decision.commit is not None
    assert decision.last_commit is None
