# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.inputs import ends_round, join_agreed, joins_wait
from rdzv.drain.decision import DrainDecision, decide
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy, LiveRound, observe
from rdzv.drain.standing import granted, phase_of
from rdzv.drain.transactions import cancel, transaction
from rdzv.keys import JobKeys
from rdzv.records.drain import NO_CURSOR, Commit, Drain, LastCommit, Vote
from rdzv.records.job import Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.records.shards import Plan, PodShards, ShardWorld, Share, TrainedShards
from rdzv.shard_ledger import ShardLedger
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import Compare, Delete, Operation, Put
from tests.support.records import member

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
NOW = 1000.0
POLICY = DrainPolicy()
ROUND = LiveRound("run", 3, True, ("a", "b"), master="10.0.0.1:29500", mod_revision=70)
ASKS = frozenset("c")
IDLE = Commit(4, "run", 3, mod_revision=60)
HOLD = replace(IDLE, epoch=5, phase="hold", leaving=("uid-a",))
SAVE = replace(HOLD, phase="commit", step=10)
DONE = replace(SAVE, phase="done", saved=("uid-a",), took_s=4.0)
VOID = replace(HOLD, phase="void", failures=1)
A = Drain("uid-a", "a", "spot", "sigterm", mod_revision=50)
B = Drain("uid-b", "b", "spot", "sigterm", mod_revision=51)
BY_HAND = replace(A, source="operator")


def scene(
    commit: Commit | None,
    *drains: Drain,
    members: str = "abc",
    least: int = 1,
    live: LiveRound | None = ROUND,
    votes: dict[str, Vote] | None = None,
    me: str = "b",
    commands: int | None = None,
    last: LastCommit | None = None,
) -> DrainingSnapshot:
    membership = Snapshot(
        90,
        Job(JobPolicy(least, 4), mod_revision=7),
        {name: member(name, at, min_workers=least) for at, name in enumerate(members, 1)},
        drains={drain.pod_uid: drain for drain in drains},
        commit=commit,
        last_commit=last,
    )
    return DrainingSnapshot(
        membership,
        listing_of(membership),
        live,
        votes or {},
        f"uid-{me}",
        commands,
        revision=membership.revision,
    )


def seen(since_s: float = NOW, due_s: dict[str, float] | None = None) -> DrainObservations:
    return DrainObservations(5, "hold", since_s, since_s, due_s or {})


def decided(snapshot: DrainingSnapshot, times: DrainObservations | None = None) -> DrainDecision:
    return decide(NOW, snapshot, times or seen(), POLICY)


def becomes(snapshot: DrainingSnapshot, times: DrainObservations | None = None) -> Commit:
    commit = decided(snapshot, times).commit
    assert commit is not None
    return commit


def vote(name: str, step: int | None = 9, **changes: object) -> Vote:
    return replace(Vote(5, 3, f"uid-{name}", step), **changes)  # type: ignore[arg-type]


VOTES = {"a": vote("a", 9), "b": vote("b", 10)}
SAVED = {"a": vote("a", 9, acked=10), "b": vote("b", 10, acked=10)}


# --- from idle ---


@pytest.mark.parametrize(("drains", "leaving"), [([A], ("uid-a",)), ([A, B], ("uid-a", "uid-b"))])
def test_drains_of_the_round_share_one_hold_with_the_next_epoch(
    drains: list[Drain], leaving: tuple[str, ...]
) -> None:
    commit = becomes(scene(IDLE, *drains))
    assert (commit.phase, commit.epoch, commit.leaving) == ("hold", 5, leaving)


@pytest.mark.parametrize(
    "used",
    [scene(None, A, last=LastCommit(7, 0, 20)), replace(scene(IDLE, A), used_epoch=20)],
    ids=["by an earlier generation", "and lost by a restored store"],
)
def test_i3_an_epoch_is_later_than_all_that_were_used(used: DrainingSnapshot) -> None:
    assert becomes(used).epoch == 21


def test_a_join_with_room_starts_a_hold() -> None:
    commit = becomes(scene(IDLE, live=replace(ROUND, reforms="join")))
    assert commit.phase == "hold"
    assert commit.joins


def test_a_newcomer_without_whom_and_with_whom_too_few_are_listed_waits() -> None:
    drained = scene(
        replace(IDLE, saved=("uid-a", "uid-b")),
        A,
        B,
        least=2,
        members="abc",
        live=replace(ROUND, reforms="join"),
    )
    assert decided(drained).commit is None


@pytest.mark.parametrize(
    "live",
    [
        replace(ROUND, left=frozenset("a")),
        replace(ROUND, left=frozenset("b")),
        replace(ROUND, finishing=True),
    ],
    ids=["the leaver has left", "another one has left", "finishing"],
)
def test_a_round_that_ends_anyway_is_left_in_peace(live: LiveRound) -> None:
    assert decided(scene(IDLE, A, live=live)).commit is None


ENDED = replace(ROUND, finishing=True, closed=True, succeeded=True)


@pytest.mark.parametrize(
    ("live", "me", "past_s", "outcome"),
    [
        (ENDED, "a", -1.0, ""),
        (ENDED, "a", 0.0, "uncommitted"),
        (ENDED, "b", 0.0, ""),
        (ENDED, "b", 5.0, "uncommitted"),
        (replace(ENDED, left=frozenset("a")), "a", -1.0, "uncommitted"),
        (replace(ENDED, left=frozenset("a")), "b", 5.0, "uncommitted"),
        (replace(ENDED, succeeded=False), "a", -1.0, "uncommitted"),
        (replace(ENDED, succeeded=False), "b", 0.0, "expired"),
        (replace(ENDED, members=("b", "c")), "a", -1.0, "uncommitted"),
    ],
)
def test_a_pod_whose_run_has_succeeded_goes_once_its_torchrun_has_ended(
    live: LiveRound, me: str, past_s: float, outcome: str
) -> None:
    drained = scene(IDLE, replace(A, reserve_s=5.0), live=live, me=me)
    decision = decided(drained, seen(due_s={"uid-a": NOW - past_s}))
    found = decision.drains.get("uid-a")
    assert (found.outcome if found else "") == outcome


def test_a_commit_of_another_round_is_reset_and_keeps_its_epoch() -> None:
    commit = becomes(scene(replace(DONE, round=2, granted=("uid-x",), refused=True), A))
    assert commit == Commit(5, "run", 3, took_s=4.0, reason=commit.reason, mod_revision=60)


# --- hold ---


def test_the_commit_step_is_the_highest_vote() -> None:
    commit = becomes(scene(HOLD, A, votes=VOTES))
    assert (commit.phase, commit.step) == ("commit", 10)


def test_all_means_the_frozen_list_whoever_can_be_reached() -> None:
    decision = decided(scene(HOLD, A, votes={"a": VOTES["a"]}, members="ac"))
    assert decision.commit is None
    assert decision.wake_at_s == NOW + POLICY.hold_s


@pytest.mark.parametrize("stale", [vote("b", epoch=4), vote("b", round=2)])
def test_a_vote_of_another_epoch_or_round_does_not_count(stale: Vote) -> None:
    assert decided(scene(HOLD, A, votes={**VOTES, "b": stale})).commit is None


def test_a_no_ends_all_attempts_in_this_round_and_lets_the_drain_go() -> None:
    commit = becomes(scene(HOLD, A, votes={"b": vote("b", None)}))
    assert commit.phase == "void"
    assert commit.refused
    decision = decided(scene(commit, A))
    assert decision.commit is None
    assert decision.drains["uid-a"].outcome == "uncommitted"


def test_a_no_that_lets_nobody_go_is_asked_for_again_after_a_pause() -> None:
    no = {"b": vote("b", None)}
    void = becomes(scene(HOLD, A, votes=no, members="ab", least=2))
    assert (void.phase, void.refused, void.failures) == ("void", False, 1)
    below = scene(void, A, members="ab", least=2)
    assert decided(below).wake_at_s == NOW + POLICY.pause_s
    assert becomes(below, seen(NOW - POLICY.pause_s)).phase == "hold"


REFUSED = replace(VOID, refused=True, failures=0)


def test_a_no_is_the_answer_to_those_whom_it_was_asked_for_alone() -> None:
    both = decided(scene(REFUSED, A, B, live=replace(ROUND, asking=ASKS)))
    assert both.drains.keys() == {"uid-a"}
    for later in (scene(REFUSED, B), scene(REFUSED), scene(REFUSED, A, members="ab", least=2)):
        assert not decided(later).drains
        after = becomes(later)
        assert (after.phase, after.refused) == ("idle", False)


def test_a_no_lets_those_newcomers_in_whom_it_was_asked_for() -> None:
    here = replace(ROUND, reforms="join")
    asked = becomes(scene(HOLD, votes={"b": vote("b", None)}, live=here))
    assert (asked.refused, asked.joins) == (True, True)
    for commit, waits in ((asked, False), (replace(asked, joins=False), True)):
        membership = scene(commit, live=here).membership
        assert joins_wait(membership, listing_of(membership), "run", 3) == waits
    assert decided(scene(asked, live=here)).commit is None
    assert not becomes(scene(replace(asked, joins=False), live=here)).refused


def test_a_no_ends_the_wave_of_newcomers_for_every_sidecar() -> None:
    """One that gathers still, as it was started in between, would ask the ranks again and again."""
    asked = replace(VOID, leaving=(), joins=True, refused=True, failures=0)
    held = replace(asked, phase="hold", refused=False)
    void, later = replace(asked, refused=False), replace(asked, round=4)
    commits = (held, asked, replace(asked, joins=False), void, later)
    assert [join_agreed(one, "run", 3) for one in commits] == [True, True, False, False, False]


def test_a_join_waits_so_long_for_ranks_that_are_away_from_their_loop() -> None:
    away = {"a": vote("a", 9, away=True), "b": vote("b", 9)}
    served = replace(SAVE, leaving=(), joins=True)
    joining = scene(served, votes=away, live=replace(ROUND, reforms="join"))
    assert decided(joining).wake_at_s == NOW + POLICY.save_s
    over = becomes(joining, seen(NOW - POLICY.save_s))
    assert (over.phase, over.refused, over.joins) == ("void", True, True)
    assert "did not come back" in over.reason


def test_a_hold_ends_after_its_time_and_the_pause_doubles() -> None:
    late = seen(NOW - POLICY.hold_s)
    assert becomes(scene(HOLD, A), late).failures == 1
    for failures, pause_s in [(1, 5), (2, 10), (3, 20), (4, 40), (20, 240)]:
        failed = scene(replace(VOID, failures=failures), A)
        assert decided(failed).wake_at_s == NOW + pause_s
        assert becomes(failed, seen(NOW - pause_s)).phase == "hold"


def test_a_hold_ends_when_the_reserve_of_a_deadline_begins() -> None:
    decision = decided(scene(HOLD, A), seen(due_s={"uid-a": NOW}))
    assert decision.commit is not None
    assert decision.commit.phase == "void"
    assert decision.drains["uid-a"].outcome == "expired"


def test_a_drain_that_comes_late_is_taken_in() -> None:
    for commit in (HOLD, SAVE):
        after = becomes(scene(commit, A, B, votes={"a": VOTES["a"]}))
        assert (after.phase, after.leaving) == (commit.phase, ("uid-a", "uid-b"))


def test_a_world_of_nobody_agrees_on_nothing() -> None:
    empty = scene(HOLD, live=replace(ROUND, members=(), reforms="join", asking=ASKS))
    assert decided(empty).commit == replace(HOLD, joins=True, leaving=(), reason=ANY)


# --- commit ---


def test_i7_done_is_all_acknowledgements_and_comes_with_the_last_commit() -> None:
    waiting = scene(SAVE, A, votes={**VOTES, "a": SAVED["a"]})
    assert decided(waiting).commit is None
    decision = decided(scene(SAVE, A, votes=SAVED), seen(NOW - 4))
    assert decision.commit is not None
    assert (decision.commit.phase, decision.commit.took_s) == ("done", 4.0)
    assert decision.last_commit == LastCommit(10, 3, 5, run="run", samples=NO_CURSOR)


def test_a_save_of_shards_that_a_restored_store_has_lost_is_void_and_lets_the_drain_go() -> None:
    began = ShardWorld("run 3", Plan(100, 10, None), 2, 5, "run", 3)
    pods = {name: PodShards(name, "", {0: Share(held=((0, 1),))}) for name in "ab"}
    lost = (ShardLedger(began, trained=TrainedShards(base=5), pods=pods),)
    saved = replace(scene(SAVE, A, votes=SAVED), ledgers=lost)
    decision = decided(saved)
    assert decision.commit is not None
    assert (decision.commit.phase, decision.commit.refused) == ("void", True)
    assert decision.last_commit is None
    assert decided(replace(scene(decision.commit, A), ledgers=lost)).drains["uid-a"].outcome == (
        "uncommitted"
    )
    # Newcomers alone are let in by the end of a world whose shards the store has lost.
    joins = replace(SAVE, leaving=(), joins=True)
    live = replace(ROUND, reforms="join")
    commit = becomes(replace(scene(joins, live=live, votes=SAVED), ledgers=lost))
    assert (commit.phase, commit.refused, commit.failures) == ("void", False, 1)


@pytest.mark.parametrize("restored", [True, False])
def test_no_save_counts_of_a_data_set_that_a_restored_store_has_lost_as_a_whole(
    *, restored: bool
) -> None:
    live = replace(ROUND, restored=restored)
    saved = replace(scene(SAVE, A, votes=SAVED, live=live), ledgers=(ShardLedger(),))
    assert becomes(saved).phase == ("void" if restored else "done")


@pytest.mark.parametrize("other", [vote("b", acked=11), vote("b", failed="disk full")])
def test_a_save_that_failed_or_differs_voids(other: Vote) -> None:
    decision = decided(scene(SAVE, A, votes={**SAVED, "b": other}))
    assert decision.commit is not None
    assert (decision.commit.phase, decision.commit.failures) == ("void", 1)
    assert decision.last_commit is None


@pytest.mark.parametrize("commit", [HOLD, SAVE])
def test_it_is_void_once_nobody_leaves_or_joins(commit: Commit) -> None:
    assert becomes(scene(commit, votes={"a": VOTES["a"]})).phase == "void"


def test_the_save_for_a_join_alone_has_a_limit() -> None:
    joining = scene(SAVE, live=replace(ROUND, reforms="join"))
    assert becomes(joining, seen(NOW - POLICY.save_s)).phase == "void"
    assert decided(scene(replace(SAVE), A), seen(NOW - POLICY.save_s)).commit is None


def test_a_deadline_opens_no_gate_once_the_step_is_agreed_on() -> None:
    decision = decided(scene(SAVE, A, votes=VOTES), seen(due_s={"uid-a": NOW}))
    assert decision.commit is None
    assert decision.drains["uid-a"].outcome == "expired"
    expired = replace(A, outcome="expired")
    assert decided(scene(SAVE, expired, votes=VOTES)).commit is None


@pytest.mark.parametrize(
    ("commit", "votes", "cause"),
    [
        (SAVE, VOTES, "the save of step 10 was not done after 25 s: no report of a, b"),
        (
            SAVE,
            {**VOTES, "b": SAVED["b"]},
            "the save of step 10 was not done after 25 s: no report of a",
        ),
        (HOLD, {"b": VOTES["b"]}, "no vote on a step to save: a"),
    ],
)
def test_an_expired_drain_says_what_was_too_slow(
    commit: Commit, votes: dict[str, Vote], cause: str
) -> None:
    seen_ = replace(seen(due_s={"uid-a": NOW}), epoch_since_s=NOW - 25)
    here = scene(replace(commit, leaving=("uid-a",)), A, votes=votes)
    assert decided(here, seen_).drains["uid-a"].cause == cause
    unasked = scene(replace(commit, leaving=()), A, votes=votes)
    assert decided(unasked, seen_).drains["uid-a"].cause == ""


PART_SAVED = {"a": SAVED["a"], "b": VOTES["b"]}
"""The leaver has saved, and who stays has not yet."""
OUT_OF_TIME = seen(due_s={"uid-a": NOW})


def test_the_deadline_of_a_leaver_that_has_saved_leaves_the_others_their_save() -> None:
    assert not decided(scene(SAVE, A, votes=PART_SAVED), OUT_OF_TIME).drains
    ended = decided(scene(SAVE, A, votes={**VOTES, "b": SAVED["b"]}), OUT_OF_TIME)
    assert ended.drains["uid-a"].outcome == "expired"


def test_a_sidecar_that_knows_no_round_leaves_the_others_their_save() -> None:
    """As beside a launcher that never comes: it knows the drain and the votes all the same."""
    decision = decided(scene(SAVE, A, votes=PART_SAVED, live=None, me="c"), OUT_OF_TIME)
    assert not decision.drains
    void = replace(SAVE, phase="void")
    ended = decided(scene(void, A, votes=PART_SAVED, live=None, me="c"), OUT_OF_TIME)
    assert ended.drains["uid-a"].outcome == "expired"


@pytest.mark.parametrize("live", [ROUND, replace(ROUND, left=frozenset("a"))])
def test_what_the_others_finish_after_the_deadline_is_committed(live: LiveRound) -> None:
    for me in "ab":
        saving = decided(scene(SAVE, A, votes=PART_SAVED, live=live, me=me), OUT_OF_TIME)
        assert not saving.drains
        assert saving.commit is None
        done = decided(scene(SAVE, A, votes=SAVED, live=live, me=me), OUT_OF_TIME)
        assert done.last_commit == LastCommit(10, 3, 5, run="run", samples=NO_CURSOR)
        over = decided(scene(DONE, A, votes=SAVED, live=live, me=me), OUT_OF_TIME)
        assert over.drains["uid-a"] == replace(A, outcome="committed", step=10)


def test_a_save_that_fails_after_the_leaver_s_deadline_ends_the_drain() -> None:
    failed = {**PART_SAVED, "b": vote("b", failed="disk full")}
    void = becomes(scene(SAVE, A, votes=failed), OUT_OF_TIME)
    assert void.phase == "void"
    assert decided(scene(void, A, votes=failed), OUT_OF_TIME).drains["uid-a"].outcome == "expired"


def test_a_save_that_no_deadline_ends_has_a_limit() -> None:
    late = replace(seen(NOW - POLICY.save_s), due_s={"uid-a": NOW - 7})
    assert decided(scene(SAVE, A, votes=PART_SAVED), late).wake_at_s == NOW - 7 + POLICY.save_s
    over = replace(late, due_s={"uid-a": NOW - POLICY.save_s})
    assert becomes(scene(SAVE, A, votes=PART_SAVED), over).phase == "void"
    # Another leaver still has its time: that one ends the save.
    both = scene(replace(SAVE, leaving=("uid-a", "uid-b")), A, B, votes=PART_SAVED)
    assert decided(both, replace(over, due_s={**over.due_s, "uid-b": NOW + 9})).commit is None


# --- done ---


def test_i7_a_leave_is_granted_in_done_with_the_step_on_record() -> None:
    decision = decided(scene(DONE, A, votes=SAVED))
    assert decision.commit is not None
    assert decision.commit.granted == ("uid-a",)
    assert decision.drains["uid-a"] == replace(A, outcome="committed", step=10)
    for commit in (IDLE, HOLD, SAVE, VOID):
        drains = decided(scene(commit, A, votes=SAVED)).drains
        assert not drains, commit.phase


def test_i10_below_min_nobody_is_let_go_before_the_deadline() -> None:
    below = scene(DONE, A, votes=SAVED, members="ab", least=2)
    assert not decided(below, seen(due_s={"uid-a": NOW + 1})).drains
    assert decided(below, seen(due_s={"uid-a": NOW})).drains["uid-a"].outcome == "committed"
    told = decide(NOW, below, seen(), DrainPolicy(below_min="commit"))
    assert told.drains["uid-a"].outcome == "committed"
    for outside in (replace(ROUND, members=("b",)), replace(ROUND, complete=False)):
        gone = scene(None, A, members="ab", least=2, live=outside, me="a")
        assert not decided(gone).drains


def test_i10_below_min_all_go_if_no_replacement_can_come() -> None:
    preempted = replace(A, preempted=True)
    alone = scene(DONE, preempted, votes=SAVED, members="ab", least=2)
    assert becomes(alone).granted == ("uid-a",)
    # The world ends with that pod: who drains for another reason is not kept in it.
    both = scene(replace(DONE, leaving=("uid-a", "uid-b")), preempted, B, votes=SAVED, least=3)
    assert becomes(both).granted == ("uid-a", "uid-b")
    # A preemption that is over says nothing about the next one.
    former = replace(preempted, pod_uid="uid-z", member="z", outcome="committed")
    assert not decided(scene(DONE, A, former, votes=SAVED, members="ab", least=2)).drains
    for drains in ((A, B), (BY_HAND, B)):
        none_stays = scene(replace(DONE, leaving=("uid-a", "uid-b")), *drains, members="ab")
        assert becomes(none_stays).granted == ("uid-a", "uid-b")
    replaced = scene(replace(DONE, leaving=("uid-a", "uid-b")), A, B, members="abc", least=2)
    assert not decided(replaced).drains


def test_i10_a_pod_of_which_no_replacement_can_come_is_not_kept_outside_of_a_round() -> None:
    outside = replace(ROUND, members=("b",))
    gone = scene(None, replace(A, preempted=True), members="ab", least=2, live=outside, me="a")
    assert decided(gone).drains["uid-a"].outcome == "uncommitted"


def test_who_stays_behind_is_told_once_that_the_step_is_saved() -> None:
    both = replace(DONE, leaving=("uid-a", "uid-b"), saved=("uid-a", "uid-b"))
    commit = becomes(scene(both, A, B, least=2), seen(due_s={"uid-a": NOW}))
    assert commit.granted == ("uid-a",)
    waits = phase_of(Snapshot(91, commit=commit), B)
    assert (waits.name, waits.sentence) == ("saved", "step 10 is saved: a may go")


def test_below_min_training_goes_on_and_the_last_chance_saves_again() -> None:
    below = scene(DONE, A, votes=SAVED, members="ab", least=2)
    assert decided(below).wake_at_s == NOW + POLICY.done_s
    assert becomes(below, seen(NOW - 30)).phase == "idle"
    again = scene(replace(DONE, phase="idle"), A, members="ab", least=2)
    assert decided(again, seen(due_s={"uid-a": NOW + 9})).wake_at_s == NOW + 1
    assert becomes(again, seen(due_s={"uid-a": NOW + 8})).phase == "hold"
    near = decided(below, seen(NOW - 30, {"uid-a": NOW + 8}))
    assert near.commit is None
    replaced = replace(ROUND, asking=ASKS)
    assert becomes(scene(replace(DONE, phase="idle"), A, least=2, live=replaced)).phase == "hold"


def test_a_member_whose_launcher_has_not_come_replaces_nobody_who_leaves() -> None:
    saved = scene(DONE, A, votes=SAVED, members="abc", least=2)
    assert decided(saved).commit is None
    assert decided(saved).drains == {}
    asked = scene(DONE, A, votes=SAVED, members="abc", least=2, live=replace(ROUND, asking=ASKS))
    assert becomes(asked).granted == ("uid-a",)


def test_after_a_grant_there_is_no_way_back() -> None:
    late = seen(NOW - 1e6)
    for after in (replace(DONE, granted=("uid-a",)), replace(DONE, admitted=True)):
        assert decided(scene(after, replace(A, outcome="committed"), votes=SAVED), late) == (
            DrainDecision(reason="step 10 is saved, the round is about to end")
        )


def test_newcomers_are_let_in_after_the_save() -> None:
    commit = becomes(scene(DONE, votes=SAVED, live=replace(ROUND, reforms="join")))
    assert commit.admitted
    membership = scene(commit).membership
    assert ends_round(membership, "run", 3)
    assert not ends_round(membership, "run", 4)
    assert not joins_wait(membership, listing_of(membership), "run", 3)
    assert joins_wait(membership, listing_of(membership), "run", 4)


# --- without a commit ---


def test_a_pod_in_no_round_is_let_go_by_its_own_sidecar() -> None:
    for live in (None, replace(ROUND, members=("b",)), replace(ROUND, complete=False)):
        assert decided(scene(None, A, live=live, me="a")).drains["uid-a"].outcome == "uncommitted"
        assert not decided(scene(None, A, live=live, me="b")).drains


def test_i3_a_pod_whose_ranks_train_in_another_run_waits_for_its_turn_or_its_deadline() -> None:
    other = LiveRound("prepare", 1, True, ("a", "c"), mod_revision=60)
    counted = replace(ROUND, members=("b",))
    here = replace(scene(None, A, live=counted, me="a"), own_round=other)
    assert not decided(here).drains
    due = seen(due_s={"uid-a": NOW})
    assert decided(here, due).drains["uid-a"].outcome == "expired"
    over = replace(here, own_round=replace(other, closed=True))
    assert decided(over).drains["uid-a"].outcome == "uncommitted"
    # Another pod has its name by now, and that one's ranks are in that round.
    taken = {**here.membership.members, "a": member("a", uid="uid-a-2")}
    lost = replace(here, membership=replace(here.membership, members=taken))
    assert decided(lost).drains["uid-a"].outcome == "uncommitted"


@pytest.mark.parametrize("live", [None, LiveRound("run", 0, False, first=True)])
def test_below_min_nobody_is_kept_for_a_world_that_has_never_been(live: LiveRound | None) -> None:
    assert decided(scene(None, A, members="ab", least=2, live=live, me="a")).drains["uid-a"] == (
        replace(A, outcome="uncommitted")
    )
    for other in (
        scene(None, A, members="ab", least=2, live=live, me="b"),
        scene(None, A, members="ab", least=2, live=live, me="a", commands=0),
        scene(None, A, members="ab", least=2, live=replace(ROUND, first=True), me="a"),
    ):
        assert not decided(other).drains


def test_a_drain_that_comes_when_the_round_is_over_is_served_by_its_save() -> None:
    over = scene(DONE, A, votes=SAVED, live=LiveRound("run", 4, False), me="a")
    assert decided(over).drains["uid-a"] == replace(A, outcome="committed", step=10)


def test_i7_the_save_of_an_earlier_round_serves_nobody_who_trains_on() -> None:
    closed = replace(ROUND, number=4, closed=True, left=frozenset("a"))
    for earlier, outcome in [
        (scene(replace(DONE, round=2), A, votes=SAVED), "expired"),
        (scene(DONE, A, votes=SAVED, live=closed, me="a"), "uncommitted"),
    ]:
        assert decided(earlier, OUT_OF_TIME).drains["uid-a"].outcome == outcome


def test_a_pod_of_another_uid_has_only_the_name_in_common() -> None:
    elder = replace(A, pod_uid="uid-a-before")
    assert decided(scene(IDLE, elder)).commit is None
    cut_off = scene(IDLE, elder, members="bc")
    holder = {"a": Incarnation("a", 9, "uid-a")}
    known = replace(cut_off, membership=replace(cut_off.membership, incarnations=holder))
    assert decided(known).commit is None


def test_a_horovod_pod_is_let_go_when_no_command_runs_in_it() -> None:
    running = scene(None, A, live=None, me="a", commands=1)
    before = observe(NOW - 1, seen(), running, {})
    assert not decide(NOW, running, before, POLICY).drains
    idle = scene(None, A, live=None, me="a", commands=0)
    ended = observe(NOW, before, idle, {})
    assert decide(NOW, idle, ended, POLICY).drains["uid-a"].outcome == "committed"
    again = observe(NOW + 1, ended, scene(None, live=None, me="a", commands=0), {})
    assert not again.own_ran


def test_a_horovod_pod_waits_for_a_first_command_that_may_be_on_its_way() -> None:
    idle = scene(None, A, live=None, me="a", commands=0)
    began = observe(NOW, seen(), idle, {})
    decision = decide(NOW, idle, began, POLICY)
    assert not decision.drains
    assert decision.wake_at_s == NOW + POLICY.launch_s
    later = observe(decision.wake_at_s, began, idle, {})
    assert decide(decision.wake_at_s, idle, later, POLICY).drains["uid-a"].outcome == "committed"
    started = observe(NOW + 1, began, scene(None, A, live=None, me="a", commands=1), {})
    assert decide(NOW + 2, idle, started, POLICY).drains["uid-a"].outcome == "committed"


# --- writing ---


def test_a_decision_rests_on_commit_round_job_and_all_drains() -> None:
    snapshot = scene(DONE, A, votes=SAVED)
    compares, operations = transaction(KEYS, snapshot, decided(snapshot))
    assert set(compares) == {
        Compare(KEYS.job, "mod", "=", 7),
        Compare(HERE.commit, "mod", "=", 60),
        Compare(HERE.drains, "mod", "<", 91, prefix=True),
        Compare(HERE.run("run").round, "mod", "=", 70),
        Compare(HERE.drain("uid-a"), "mod", "=", 50),
        Compare(HERE.member("b"), "create", ">", 0),  # whom min counts, and who may have vanished
    }
    assert [operation.key for operation in operations] == [HERE.commit, HERE.drain("uid-a")]


def test_who_is_out_of_time_is_given_up_only_where_it_has_not_saved_since() -> None:
    known = {**VOTES, "a": replace(VOTES["a"], mod_revision=66)}
    for votes, revision in ((known, 66), ({}, 0)):
        snapshot = scene(SAVE, A, votes=votes)
        compares, _ = transaction(KEYS, snapshot, decided(snapshot, OUT_OF_TIME))
        assert Compare(HERE.vote(5, "a"), "mod", "=", revision) in compares


def test_a_new_epoch_drops_the_votes_of_the_old_ones() -> None:
    snapshot = scene(IDLE, A)
    operations = transaction(KEYS, snapshot, decided(snapshot))[1]
    assert Delete(HERE.votes, prefix=True) in operations


def cancelled(
    commit: Commit | None, drain: Drain = BY_HAND
) -> tuple[Sequence[Compare], Sequence[Operation]]:
    made = cancel(KEYS, scene(commit, drain).membership, "uid-a")
    assert not isinstance(made, str), made
    return made


def test_a_cancel_takes_the_drain_and_the_commit_together() -> None:
    compares, operations = cancelled(SAVE)
    assert {compare.key for compare in compares} == {HERE.commit, HERE.drain("uid-a")}
    assert operations[0] == Delete(HERE.drain("uid-a"))
    assert isinstance(operations[1], Put)
    assert b'"leaving":[]' in operations[1].value
    assert "does not drain" in str(cancel(KEYS, scene(None).membership, "uid-a"))


def test_i7_a_cancel_after_the_grant_ends_the_round_and_grants_no_later_drain() -> None:
    late = replace(DONE, granted=("uid-a",), saved=("uid-a",))
    commit = cancelled(late, replace(BY_HAND, outcome="committed", step=10))[1][1]
    after = replace(late, leaving=(), saved=(), granted=(), admitted=True)
    assert commit == Put(HERE.commit, after.to_json())
    # It may drain again in the next round, which it has trained in.
    assert not granted(after, A)
    # Who drains again in that round stands behind the same save.
    assert decided(scene(after, A, votes=SAVED)).drains["uid-a"].outcome == "committed"


def test_a_cancel_after_the_deadline_leaves_the_save_of_the_others_as_it_is() -> None:
    over = cancelled(SAVE, replace(BY_HAND, outcome="expired"))[1][1]
    assert over == Put(HERE.commit, SAVE.to_json())


@pytest.mark.parametrize(
    "ends",
    [A, replace(A, source="prestop"), replace(A, source="hold"), replace(BY_HAND, ending=True)],
)
def test_the_drain_of_a_pod_that_is_being_ended_cannot_be_cancelled(ends: Drain) -> None:
    assert "is being ended" in str(cancel(KEYS, scene(SAVE, ends).membership, "uid-a"))
    assert cancelled(SAVE, replace(A, source="control"))


# --- time ---


def test_a_deadline_counts_from_when_it_was_first_heard_of() -> None:
    told = replace(A, seconds_left=30.0, reserve_s=5.0)
    first = observe(NOW, DrainObservations(), scene(HOLD, told), {})
    assert first.due_s == {"uid-a": NOW + 25}
    later = observe(NOW + 9, first, scene(SAVE, told), {})
    assert later.due_s == {"uid-a": NOW + 25}
    assert (later.since_s, later.epoch_since_s) == (NOW + 9, NOW)
    sooner = observe(NOW + 9, first, scene(SAVE, replace(told, seconds_left=10.0)), {})
    assert sooner.due_s == {"uid-a": NOW + 14}
    assert observe(NOW, first, scene(SAVE, told), {"uid-a": NOW + 2}).due_s == {"uid-a": NOW + 2}
    assert observe(NOW, first, scene(SAVE), {}).due_s == {}


PODS = st.lists(st.sampled_from(["uid-a", "uid-b", "uid-x"]), unique=True).map(tuple)
COMMITS = st.builds(
    Commit,
    epoch=st.integers(0, 6),
    run=st.sampled_from(["run", "other"]),
    round=st.integers(2, 4),
    phase=st.sampled_from(["idle", "hold", "commit", "done", "void"]),
    step=st.none() | st.integers(0, 20),
    leaving=PODS,
    saved=PODS,
    granted=PODS,
    joins=st.booleans(),
    admitted=st.booleans(),
    refused=st.booleans(),
    failures=st.integers(0, 100),
    took_s=st.floats(0, 1e6),
    mod_revision=st.integers(0, 90),
)
BALLOTS = st.dictionaries(
    st.sampled_from("abx"),
    st.builds(
        Vote,
        epoch=st.integers(0, 6),
        round=st.integers(2, 4),
        pod_uid=st.sampled_from(["uid-a", "uid-b"]),
        vote=st.none() | st.integers(0, 20),
        acked=st.none() | st.integers(8, 11),
        failed=st.sampled_from(["", "disk full"]),
    ),
)
ROUNDS = st.none() | st.builds(
    LiveRound,
    run=st.just("run"),
    number=st.integers(2, 4),
    complete=st.booleans(),
    members=st.sampled_from([(), ("a",), ("a", "b"), ("a", "b", "x")]),
    left=st.frozensets(st.sampled_from("abx")),
    reforms=st.sampled_from(["", "join", "shrink", "pause"]),
    finishing=st.booleans(),
    closed=st.booleans(),
    first=st.booleans(),
)
DRAINS = st.sets(
    st.sampled_from([A, B, replace(A, outcome="committed"), replace(B, outcome="expired")])
)
TIMES = st.builds(
    DrainObservations,
    st.integers(0, 6),
    since_s=st.floats(0, NOW),
    epoch_since_s=st.floats(0, NOW),
    due_s=st.dictionaries(st.sampled_from(["uid-a", "uid-b"]), st.floats(NOW - 50, NOW + 50)),
)


@given(
    COMMITS | st.none(), DRAINS, BALLOTS, ROUNDS, TIMES, st.integers(1, 3), st.sampled_from("ab")
)
def test_i7_i10_any_snapshot_gets_one_decision_and_a_sentence(
    commit: Commit | None,
    drains: set[Drain],
    ballots: dict[str, Vote],
    live: LiveRound | None,
    times: DrainObservations,
    least: int,
    me: str,
) -> None:
    snapshot = scene(commit, *drains, votes=ballots, live=live, least=least, me=me)
    decision = decide(NOW, snapshot, times, POLICY)
    assert decision.reason
    assert "\n" not in decision.reason
    assert decision.wake_at_s > NOW
    transaction(KEYS, snapshot, decision)
    if decision.last_commit is not None:
        assert decision.commit is not None
        assert decision.commit.phase == "done"
    enough = len(snapshot.listing.listed) >= least
    for uid, drain in decision.drains.items():
        due = times.due_s.get(uid, math.inf) <= NOW
        untrained = live is None or (live.first and not live.complete)
        assert due or ((enough or untrained) and drain.outcome != "expired")
        if drain.outcome == "committed" and snapshot.commands is None:
            assert snapshot.commit.phase == "done"


def test_what_is_due_already_hides_no_moment_to_come() -> None:
    # Saved for longer than the others wait, and too late to save again: only its deadline is left.
    decision = decided(scene(DONE, A, members="ab", least=2), seen(NOW - 60, {"uid-a": NOW + 5}))
    assert (decision.commit, decision.wake_at_s) == (None, NOW + 5)
