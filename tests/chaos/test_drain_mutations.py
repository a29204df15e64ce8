# SPDX-License-Identifier: Apache-2.0
"""Tests of the exploration: with any one rule left out, it finds what goes wrong."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.support.models import drain_mutations as mutations
from tests.support.models.drains import OTHERS_STILL_SAVE, OUT_OF_TIME, Broken, Fault, Rules, World

BOTH_HELD_AND_VOID = (
    "rank 0 at 0 goes",
    "rank 1 at 0 goes",
    "rank 0 arrives",
    "rank 1 arrives",
    "notice for 0",
    "0 hears",
    "0 writes hold",
    "0 hears",
    "0 shows hold",
    "1 hears",
    "1 shows hold",
    "rank 0 at 1 reads: publish",
    "rank 0 at 1 publishes",
    "rank 1 at 1 reads: publish",
    "rank 1 at 1 publishes",
    "(early) (time) 0 writes void",
    "0 hears",
    "0 shows void",
)
"""Both ranks are held at boundary 1, the hold has come to nothing, and pod 0 knows."""


def found(world: World, *labels: str, seeds: int = 4000) -> str:
    """What random orders find wrong, the first of them."""
    first = world.after(*labels)
    for seed in range(seeds):
        try:
            world.walk(Random(seed), first)
        except Broken as broken:
            return str(broken)
    return ""


def only(*faults: Fault, **changes: int) -> Rules:
    return Rules(faults=faults, fault_count=1, **changes)  # type: ignore[arg-type]


def test_a_sidecar_that_lets_its_rank_go_after_sending_its_vote() -> None:
    rules = Rules(faults=("cut",), fault_count=2)
    assert "runs past step" in found(mutations.OpensAfterSending(rules))


def test_a_held_flag_that_is_not_taken_back() -> None:
    world = mutations.HeldNotTakenBack(Rules(hurry=2))
    assert "past step" in found(world, *BOTH_HELD_AND_VOID)


def test_a_held_flag_that_is_cleared_without_reading_the_gate_again() -> None:
    world = mutations.HeldClearedOnly(Rules(hurry=2))
    assert "past step" in found(world, *BOTH_HELD_AND_VOID)


def test_a_change_of_the_commit_that_does_not_compare_the_round() -> None:
    assert "I" in found(mutations.RoundNotCompared(only("rank", hurry=1)))


def test_a_sidecar_that_clears_the_gate_when_it_starts() -> None:
    assert "runs past step" in found(mutations.GateClearedAtStart(only("crash")))


@pytest.mark.parametrize("mutation", [mutations.OnlyWhoCanBeReached, mutations.OnlyVotersSave])
def test_all_that_means_all_that_can_be_reached(mutation: type[World]) -> None:
    assert "I3" in found(mutation(only("cut", hurry=2)))


def test_done_that_goes_back_to_idle_after_a_grant() -> None:
    world = mutations.DoneGoesBackAfterAGrant(Rules(hurry=1))
    assert "is trained by 0 after its grant" in found(world)


def test_a_new_round_that_opens_the_gate_of_a_parked_leaver() -> None:
    assert "after its grant" in found(mutations.LaterRoundOpensTheGate(Rules()))


def test_a_commit_without_a_way_to_void() -> None:
    world = mutations.CommitNeverVoid(only("fail", cancels=1))
    assert "waits for ever" in found(world)


def test_a_cancel_on_another_key() -> None:
    world = mutations.CancelOnAnotherKey(Rules(cancels=1, boundaries=2))
    assert "a cancelled drain of 0 is released" in found(world)


def test_i10_min_judged_from_a_stale_snapshot() -> None:
    world = mutations.MinFromAStaleSnapshot(Rules(notices=(0, 1), boundaries=2))
    assert "released below min" in found(world)


def test_a_gate_of_another_round_that_is_obeyed() -> None:
    assert "after its grant" in found(mutations.EarlierGateObeyed(Rules()))


def test_i3_a_gate_that_is_read_before_publishing() -> None:
    assert "I3" in found(mutations.GateBeforePublishing(Rules()))


def test_i3_progress_that_is_read_before_the_gate_is_written() -> None:
    assert "I3" in found(mutations.ProgressBeforeGate(Rules()))


def test_i3_a_vote_for_the_highest_boundary_instead_of_one_more() -> None:
    assert "I3" in found(mutations.VoteIsTheHighestBoundary(Rules()))


def test_i7_done_before_all_have_acknowledged() -> None:
    assert "I7" in found(mutations.DoneBeforeAllHaveSaved(Rules()))


def test_i7_acknowledgements_that_are_not_compared() -> None:
    rules = Rules(strides=(1, 2), boundaries=6, lockstep=False)
    assert "I7" in found(mutations.AcknowledgementsNotCompared(rules))


def test_a_leaver_that_others_wait_for_when_their_round_is_lost() -> None:
    rules = Rules(deadlines=False, faults=("rank",), fault_count=1)
    assert "waits for ever" in found(mutations.LeaversNotExcused(rules))


def test_i7_a_leaver_that_has_saved_and_whose_loss_ends_the_save_of_the_others() -> None:
    world = mutations.LossOfASaverEndsTheSave(Rules(boundaries=1, hurry=2))
    assert "cut short by who has saved" in found(world, *OUT_OF_TIME)


def test_i7_a_leaver_that_has_saved_and_whose_deadline_ends_the_save_of_the_others() -> None:
    world = mutations.DeadlineOfASaverEndsTheSave(Rules(boundaries=1, hurry=2))
    assert "cut short by who has saved" in found(world, *OUT_OF_TIME)


def test_i7_a_leaver_that_is_given_up_by_who_has_not_heard_that_it_saved() -> None:
    world = mutations.GivenUpUnheard(Rules(boundaries=1, hurry=2))
    assert "cut short by who has saved" in found(world, *OTHERS_STILL_SAVE[:-1])


def test_a_save_without_a_limit_that_never_returns() -> None:
    world = mutations.SaveWithoutALimit(only("stuck", boundaries=1, hurry=2))
    assert "waits for ever" in found(world, *OUT_OF_TIME)


LOOPS = Rules(boundaries=4, block=2, hurry=1)


def test_i3_entering_a_loop_that_is_taken_for_the_first_boundary() -> None:
    world = mutations.EnteringForgets(replace(LOOPS, lockstep=False))
    assert "I3" in found(world)


def test_a_rank_between_two_loops_that_is_taken_for_one_that_takes_no_part() -> None:
    assert "says that they do not" in found(mutations.AwayTakesNoPart(LOOPS))


def test_a_rank_between_two_loops_that_is_taken_for_a_save_that_failed() -> None:
    assert "gives that up" in found(mutations.AwayHasFailed(LOOPS))


def test_i3_a_rank_between_two_loops_that_votes_for_its_last_boundary() -> None:
    assert "I3" in found(mutations.AwayHasPassedNothing(LOOPS))


def test_a_refusal_that_sticks_to_the_round() -> None:
    world = mutations.RefusalSticks(Rules(notices=(0, 1), outsider=1, cancels=1, hurry=1))
    assert "1 goes without a save that nobody was asked for" in found(world)


def test_a_refusal_that_lets_later_newcomers_in() -> None:
    world = mutations.RefusalOpensTheDoor(Rules(joiners=1, outsider=1, cancels=1))
    assert "newcomers are let in" in found(world)


def test_newcomers_that_wait_for_ranks_which_never_come_back_to_a_loop() -> None:
    rules = only("stay", joiners=1, boundaries=4, block=1)
    world = mutations.AwayForEver(replace(rules, notices=()))
    assert "no end" in found(world)


def test_an_admission_that_does_not_end_the_round() -> None:
    rules = only("vanish", members=1, joiners=1, boundaries=1)
    world = mutations.AdmissionDoesNotEndTheRound(replace(rules, notices=()))
    with pytest.raises(Broken, match="waits for ever"):
        world.explore(200_000)


def test_i2_a_listing_that_ignores_drains() -> None:
    world = mutations.ListingIgnoresDrains(Rules(notices=(0, 1)))
    assert "I2" in found(world)


def test_the_vote_no_left_out_breaks_nothing() -> None:
    assert found(mutations.NeverNo(Rules(outsider=1)), seeds=300) == ""
    assert found(mutations.NeverNo(Rules(members=3, outsider=1, hurry=2)), seeds=150) == ""
