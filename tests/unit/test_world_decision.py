# SPDX-License-Identifier: Apache-2.0
"""The decision on a world that changes in place, case by case, and what its pods report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from agent.world_report import report_of, shown
from launcher_shim.c10d.rounds.records import Seat
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import RankInWorld, RankProgress
from rdzv.records.world import WorldChange, WorldReport
from rdzv.world import Lasting, WorldPolicy, WorldSnapshot, decide, knows

POLICY = WorldPolicy()
TORCH = "2.15.0"


def report(member: str, **fields: Any) -> WorldReport:
    """The report of a pod with one rank, in world 3."""
    said = {"ranks": 1, "torch": TORCH, "number": 3, **fields}
    return WorldReport(member, **said)


def snapshot(*reports: WorldReport, **fields: Any) -> WorldSnapshot:
    """Two members that train in world 3 of round 7."""
    said = {one.member: one for one in (report("a"), report("b"), *reports)}
    change = WorldChange(epoch=10, phase="train", round=7, number=3)
    known = {"world": 3, "members": ("a", "b"), "sizes": JobPolicy(1, 4), **fields}
    return WorldSnapshot(known.pop("change", change), 7, reports=said, **known)


def decided(given: WorldSnapshot, now: float = 0.0) -> tuple[str, WorldChange | None]:
    """The action and the change, seen first at time 0."""
    decision = decide(now, 0.0, given, POLICY)
    return decision.action, decision.change


def changed(given: WorldSnapshot, now: float = 0.0) -> tuple[str, WorldChange]:
    """The action and the change, of which there is one."""
    action, change = decided(given, now)
    assert change is not None
    return action, change


HOLDING = WorldChange(epoch=11, phase="hold", round=7, number=3)
STOPPING = replace(HOLDING, epoch=12, step=41)
FORMING = WorldChange(
    epoch=13, phase="form", round=7, number=4, step=41, seats=("a", "b", "c"), sizes=(1, 1, 1),
    source="a",
)  # fmt: skip
READY = report("c", number=-1, step=0, ready=True)


def test_a_world_without_newcomers_or_leavers_trains_on() -> None:
    assert decided(snapshot()) == ("keep", None)


def test_no_rank_is_held_before_the_newcomer_is_ready() -> None:
    compiling = replace(READY, ready=False)
    assert decided(snapshot(compiling, newcomers=("c",))) == ("keep", None)
    action, change = changed(snapshot(READY, newcomers=("c",)))
    assert (action, change.phase, change.step, change.epoch) == ("hold", "hold", None, 11)


def test_a_newcomer_without_room_waits() -> None:
    assert decided(snapshot(READY, newcomers=("c",), sizes=JobPolicy(1, 2))) == ("keep", None)


def test_a_newcomer_of_an_unknown_torch_is_not_taken_in() -> None:
    assert decided(snapshot(replace(READY, torch="9.9"), newcomers=("c",))) == ("keep", None)
    known = {one: knows(one) for one in ("2.15.0+cu132", "2.150", "")}
    assert list(known.values()) == [True, False, False]


def test_all_stop_at_the_highest_vote() -> None:
    votes = [report("a", vote=40, voted=11), report("b", vote=41, voted=11)]
    given = snapshot(*votes, READY, newcomers=("c",), change=HOLDING)
    action, change = changed(given)
    assert (action, change.phase, change.step, change.epoch) == ("commit", "hold", 41, 12)


def test_a_vote_of_another_epoch_does_not_count() -> None:
    votes = [report("a", vote=40, voted=11), report("b", vote=41, voted=10)]
    assert decided(snapshot(*votes, READY, newcomers=("c",), change=HOLDING)) == ("keep", None)


def test_they_form_once_all_stand_at_the_step() -> None:
    there = [report("a", held=12, step=41), report("b", held=12, step=40)]
    given = snapshot(*there, READY, newcomers=("c",), change=STOPPING)
    assert decided(given) == ("keep", None)
    given = snapshot(there[0], report("b", held=12, step=41), READY, newcomers=("c",),
                     change=STOPPING)  # fmt: skip
    action, change = changed(given)
    assert (action, change.number, change.seats) == ("form", 4, ("a", "b", "c"))
    assert (change.step, change.source, change.first_rank("c")) == (41, "a", 2)


def test_a_leaver_is_in_the_hold_and_not_in_the_next_world() -> None:
    there = [report("a", held=12, step=41), report("b", held=12, step=41)]
    action, change = changed(snapshot(*there, leaving=frozenset("a"), change=STOPPING))
    assert (action, change.seats, change.source) == ("form", ("b",), "b")


def test_the_world_has_formed_when_all_have_its_state() -> None:
    formed = [report(name, formed=4) for name in "abc"]
    part = snapshot(*formed[:2], READY, newcomers=("c",), change=FORMING)
    assert decided(part) == ("keep", None)
    action, change = changed(snapshot(*formed, newcomers=("c",), change=FORMING))
    assert (action, change.phase, change.number) == ("formed", "train", 4)


@pytest.mark.parametrize("cause", ["lost", "failed", "time"])
def test_a_form_that_fails_is_given_up_and_its_number_never_tried_again(cause: str) -> None:
    formed = [report("a", formed=4), report("b", formed=4)]
    failed = report("c", failed=4, why="no route") if cause == "failed" else READY
    lost = frozenset("c") if cause == "lost" else frozenset[str]()
    given = snapshot(*formed, failed, newcomers=("c",), lost=lost, change=FORMING)
    action, broken = changed(given, POLICY.form_s)
    assert (action, broken.phase, broken.attempts) == ("break", "broken", 1)
    answers = [report(name, epoch=broken.epoch, step=41) for name in "ab"]
    action, again = changed(snapshot(*answers, lost=lost, change=broken))
    assert (action, again.number, again.seats) == ("form", 5, ("a", "b"))


def test_the_third_failure_falls_back() -> None:
    given = snapshot(report("a", failed=4), change=replace(FORMING, attempts=2))
    decision = decide(0.0, 0.0, given, POLICY)
    assert (decision.action, decision.whole) == ("fall back", False)


def test_no_time_counts_while_the_store_is_away() -> None:
    given, now = snapshot(change=FORMING), 10 * POLICY.form_s
    for answers_for_s, action in ((0.0, "keep"), (1.0, "keep"), (POLICY.form_s, "break")):
        lasting = Lasting()
        lasting.since_s(0.0, given, math.inf)
        since_s = lasting.since_s(now, given, answers_for_s)
        assert decide(now, since_s, given, POLICY).action == action


def test_a_round_has_its_own_time_for_its_first_world() -> None:
    """Its ranks may begin long after the round before fell back."""
    lasting, later = Lasting(), 2 * POLICY.start_s
    before = WorldChange(9, round=6, phase="fall-back", number=4)
    lasting.since_s(0.0, replace(snapshot(change=before), round=6), math.inf)
    given = snapshot(report("a", ready=True), change=before, world=0)
    assert decide(later, lasting.since_s(later, given, math.inf), given, POLICY).action == "keep"


def test_a_loss_goes_on_from_the_highest_whole_step() -> None:
    members = {"members": ("a", "b", "c"), "lost": frozenset("a")}
    action, broken = changed(snapshot(report("c"), **members))
    assert (action, broken.phase, broken.attempts) == ("break", "broken", 0)
    waiting = [report("b", epoch=broken.epoch, step=40), report("c", step=41)]
    assert decided(snapshot(*waiting, change=broken, **members)) == ("keep", None)
    told = [waiting[0], report("c", epoch=broken.epoch, step=41)]
    action, change = changed(snapshot(*told, change=broken, **members))
    assert (action, change.seats, change.step, change.source) == ("form", ("b", "c"), 41, "c")


def test_a_rank_without_whole_state_is_no_source() -> None:
    broken = WorldChange(epoch=11, phase="broken", round=7, number=3)
    told = [report("a", epoch=11, step=-1), report("b", epoch=11, step=40)]
    action, change = changed(snapshot(*told, change=broken))
    assert (action, change.step, change.source) == ("form", 40, "b")
    nothing = [report(name, epoch=11, step=-1) for name in "ab"]
    assert decided(snapshot(*nothing, change=broken))[0] == "fall back"


def test_a_leave_at_min_or_of_the_last_pod_saves_as_today() -> None:
    at_min = snapshot(leaving=frozenset("a"), sizes=JobPolicy(2, 4))
    last = snapshot(leaving=frozenset("ab"))
    for given in (at_min, last):
        decision = decide(0.0, 0.0, given, POLICY)
        assert (decision.action, decision.whole) == ("fall back", True)


def test_a_leave_at_min_waits_for_no_save_if_a_newcomer_is_ready() -> None:
    given = snapshot(READY, newcomers=("c",), leaving=frozenset("a"), sizes=JobPolicy(2, 4))
    assert changed(given)[0] == "hold"


def test_ranks_that_broke_as_it_fell_back_start_again() -> None:
    fell = WorldChange(epoch=11, phase="fall-back", round=7, number=3, reason="the job is paused")
    assert decided(snapshot(world=0, change=fell)) == ("keep", None)
    given = snapshot(report("b", broken=3), world=0, change=fell)
    decision = decide(0.0, 0.0, given, POLICY)
    assert (decision.action, decision.whole) == ("fall back", False)
    assert decided(replace(given, live=False)) == ("keep", None)


def test_the_first_world_forms_when_all_are_ready() -> None:
    waiting = report("b", number=-1, step=30, ready=True)
    first = snapshot(
        report("a", number=-1, step=20, ready=True), waiting, world=0, change=WorldChange(round=6)
    )
    action, change = changed(first)
    assert (action, change.round, change.step, change.source) == ("form", 7, 30, "b")
    one = replace(first, reports={"b": waiting})
    assert decided(one) == ("keep", None)
    assert decided(one, POLICY.start_s)[0] == "fall back"


def test_one_that_the_world_before_has_lost_does_not_hold_up_the_next() -> None:
    ready = [report(name, number=-1, step=20, ready=True) for name in "ab"]
    former = WorldChange(epoch=13, phase="form", round=6, number=4, seats=("a", "c"))
    action, change = changed(snapshot(*ready, world=0, change=former, lost=frozenset("c")))
    assert (action, change.seats, change.number) == ("form", ("a", "b"), 5)


def test_one_rank_that_takes_no_part_is_enough_to_fall_back() -> None:
    ready = report("a", number=-1, step=0, ready=True)
    given = snapshot(ready, WorldReport("b", plain=True), world=0, change=WorldChange())
    assert decided(given)[0] == "fall back"
    assert decided(snapshot(ready, world=0, change=WorldChange(), older=frozenset("b")))[0] == (
        "fall back"
    )
    assert decided(snapshot(older=frozenset("c")))[0] == "fall back"
    old = replace(ready, torch="2.1")
    assert decided(snapshot(old, world=0, change=WorldChange()))[0] == "fall back"


def test_without_a_rank_that_takes_part_nothing_is_decided() -> None:
    given = replace(snapshot(world=0, change=WorldChange()), reports={})
    assert decided(given, 10 * POLICY.start_s) == ("keep", None)


def test_epochs_and_numbers_pass_all_that_ranks_have_seen() -> None:
    seen = report("a", epoch=90, formed=8)
    _, change = changed(snapshot(seen, READY, newcomers=("c",)))
    assert change.epoch == 91
    held = [replace(seen, held=12, step=41), report("b", held=12, step=41)]
    _, change = changed(snapshot(*held, READY, newcomers=("c",), change=STOPPING))
    assert change.number == 9


def test_a_world_that_ends_is_left_alone() -> None:
    over = report("a", over=True)
    assert decided(snapshot(over, READY, newcomers=("c",))) == ("keep", None)
    assert decided(snapshot(READY, newcomers=("c",), live=False)) == ("keep", None)


def test_a_pause_falls_back_to_the_save_of_today() -> None:
    decision = decide(0.0, 0.0, snapshot(reforms="the job is paused"), POLICY)
    assert (decision.action, decision.whole) == ("fall back", True)


BROKEN = WorldChange(13, "broken", 7, 4, reason="c is lost")


def reported(member: str, *steps: int) -> WorldReport:
    """The report of a pod whose ranks hold these steps, -1 for none that is whole."""
    lines = [
        RankProgress(
            rank, len(steps), "m:1", step, True, False,
            in_world=RankInWorld(3, step, epoch=13, torch="2.15.0"),
        )
        for rank, step in enumerate(steps)
    ]  # fmt: skip
    report = report_of(lines, Seat(member, "n", 1), BROKEN, None)
    assert report is not None
    return report


@pytest.mark.parametrize(
    ("steps", "step", "holder"),
    [((41, 41), 41, 0), ((40, 41), 41, 1), ((-1, 41), 41, 1), ((41, -1), 41, 0), ((-1, -1), -1, 0)],
)
def test_i13_the_highest_whole_step_of_a_pod_counts_and_who_holds_it(
    steps: tuple[int, ...], step: int, holder: int
) -> None:
    report = reported("a", *steps)
    assert (report.step, report.holder, report.held) == (step, holder, 0)


def test_i13_the_state_comes_from_the_rank_that_holds_the_step() -> None:
    """Each rank at that step holds it whole while the state goes over: another's would tear it."""
    reports = {"a": reported("a", 40, -1), "b": reported("b", 40, 41)}
    snapshot = WorldSnapshot(
        BROKEN, 7, world=3, members=("a", "b"), reports=reports, sizes=JobPolicy(1, 4)
    )
    change = decide(0.0, 0.0, snapshot, WorldPolicy()).change
    assert change is not None
    assert (change.phase, change.step, change.source) == ("form", 41, "b")
    content = shown(
        change, 3, ["a", "b"], "a", was_in=True, own_round=False, closed=False, store="s", root="r/"
    )
    assert json.loads(content)["source"] == 3
