# SPDX-License-Identifier: Apache-2.0
"""A job whose worlds all fail before a step: how long the next one waits, and what ends that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher_shim.c10d.rounds.decision import (
    LONGEST_S,
    back_off,
    decide,
    failed_starts,
    would_form,
)
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot, run_membership
from launcher_shim.c10d.rounds.observations import RoundObservations
from launcher_shim.c10d.rounds.records import LeftReason, Round
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.troubles import Failure
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import KeyValue
from tests.support.records import member, node, run, world

NOW = 1000.0
ERROR = Failure("a", "digits", 8, 0, "ImportError", "no module named x", "train.py:3")
OPEN = Round(9, former=("a", "b"), mod_revision=50, failed_starts=4, waits=1)


def fails(names: str, **changes: Any) -> dict[str, Failure]:
    return {name: replace(ERROR, member=name, **changes) for name in names}


def waiting(
    asking: str = "ab",
    failed: dict[str, Failure] | None = None,
    current: Round = OPEN,
    new: str = "",
    quarantined: str = "",
    job_revision: int = 3,
) -> RunSnapshot:
    membership = RoundMembers(
        frozenset(asking) | frozenset(current.former),
        quarantined=frozenset(quarantined),
        failed=fails("ab") if failed is None else failed,
        job_revision=job_revision,
    )
    nodes = [node(name, ask=1 if name in new else 5) for name in asking]
    return run(nodes, current, membership=membership)


def wait_s(snapshot: RunSnapshot, least: int = 2, most: int = 4) -> float:
    sizes = JobPolicy(least, most)
    return back_off(snapshot, would_form(snapshot, sizes), sizes).wait_s


@pytest.mark.parametrize(
    ("waits", "waits_s"), [(0, 20), (1, 40), (2, 80), (3, 160), (4, LONGEST_S), (10**9, 300)]
)
def test_each_wait_is_twice_as_long_as_the_one_before(waits: int, waits_s: float) -> None:
    assert wait_s(waiting(current=replace(OPEN, waits=waits))) == waits_s


@pytest.mark.parametrize(("row", "waits_s"), [(0, 0), (2, 0), (3, 40), (50, 40)])
def test_the_first_tries_wait_for_nothing(row: int, waits_s: float) -> None:
    assert wait_s(waiting(current=replace(OPEN, failed_starts=row))) == waits_s


def test_the_reason_names_the_error_and_what_ends_the_wait() -> None:
    one = waiting()
    reason = back_off(one, would_form(one, JobPolicy(2, 4)), JobPolicy(2, 4)).reason
    assert reason == (
        "waits 40 s before round 9: all failed alike before a step was reported, 4 times:"
        " ImportError: no module named x (train.py:3); a new pod or muster resume ends the wait"
    )
    few = waiting(failed=fails("b"))
    reason = back_off(few, would_form(few, JobPolicy(2, 4)), JobPolicy(2, 4)).reason
    assert "4 worlds in a row failed before a step was reported, the last by b: Import" in reason


@pytest.mark.parametrize(
    ("one", "least"),
    [
        (waiting("abc", new="c"), 2),
        (waiting("ab", new="b"), 2),
        (waiting(job_revision=51), 2),
        (waiting(failed={}), 2),
        (waiting(failed=fails("a")), 1),
        (waiting("abc", fails("ab"), replace(OPEN, former=("a", "b", "c"))), 1),
        (waiting("bc", fails("abc"), replace(OPEN, former=("a", "b", "c")), quarantined="a"), 1),
    ],
    ids=[
        "a new pod",
        "a replacement of the same name",
        "the job has changed",
        "nothing on record",
        "another could train alone",
        "a third could train alone",
        "the quarantine leaves one out",
    ],
)
def test_i11_there_is_no_wait_for(one: RunSnapshot, least: int) -> None:
    assert wait_s(one, least) == 0


def test_a_member_that_was_in_the_last_world_counts_though_it_is_not_back_yet() -> None:
    assert wait_s(waiting("a", fails("a")), least=1) == 0
    assert wait_s(waiting("a", fails("ab")), least=1) == 40


@pytest.mark.parametrize(("left_reason", "waits_s"), [("exit", 0), ("closed", 40), ("hung", 40)])
def test_i11_a_member_that_left_the_world_before_the_last_to_ask_again_counts(
    left_reason: LeftReason, waits_s: float
) -> None:
    # Its watch may stand still: it asks once it sees the round that is open.
    current = replace(OPEN, former=("a",))
    late = node("b", "left", left=left_reason)
    membership = RoundMembers(frozenset("ab"), failed=fails("a"), job_revision=3)
    assert wait_s(run([node("a", ask=5), late], current, membership=membership), 1) == waits_s


def test_a_spare_without_a_place_does_not_end_the_wait() -> None:
    assert wait_s(waiting("abc", new="c"), least=2, most=2) == 40


def test_a_quarantined_member_that_min_needs_ends_no_wait() -> None:
    assert wait_s(waiting(quarantined="a")) == 40


def test_the_round_stays_open_until_the_wait_is_over() -> None:
    seen = RoundObservations(healthy_since_s=0.0, round_since_s=NOW - 39, met_min_s=0.0)
    policy = RoundPolicy(2, 2)
    waits = decide(NOW, waiting(), seen, policy)
    assert (waits.round, waits.wake_at_s, waits.wait.member) == (None, NOW + 1, "a")
    formed = decide(NOW + 1, waiting(), seen, policy).round
    assert formed is not None
    assert (formed.failed_starts, formed.waits) == (4, 2)
    new = decide(NOW, waiting(new="b"), seen, policy).round
    assert new is not None
    assert (new.failed_starts, new.waits) == (4, 0)
    paused = decide(NOW, waiting(), seen, replace(policy, paused=True))
    assert "paused" in paused.reason


# --- the row ---

ENDED = world("ab", mod_revision=50, failed_starts=2, waits=4)
SAW = RoundObservations(formed_s=NOW - 5, saw_it_form=True)


@pytest.mark.parametrize(
    ("current", "seen", "row"),
    [
        (replace(ENDED, ends="it has lost a"), SAW, 3),
        (ENDED, SAW, 3),
        (replace(ENDED, closed="failure"), SAW, 3),
        (replace(ENDED, progress="loads"), replace(SAW, formed_s=NOW - 3600), 3),
        (replace(ENDED, ends="a leave, a join or a pause was granted"), SAW, 2),
        (replace(ENDED, progress="steps"), SAW, 0),
        (replace(ENDED, finishing=True), SAW, 0),
        (ENDED, replace(SAW, formed_s=NOW - 60), 0),
        (replace(ENDED, progress="mute"), replace(SAW, formed_s=NOW - 60), 0),
        (replace(ENDED, start_s=90.0), replace(SAW, formed_s=NOW - 60), 3),
        (ENDED, replace(SAW, formed_s=NOW - 90, ending_since_s=NOW - 70), 3),
        (ENDED, replace(SAW, saw_it_form=False), 0),
    ],
)
def test_a_world_that_fails_before_a_step_makes_the_row_longer(
    current: Round, seen: RoundObservations, row: int
) -> None:
    assert failed_starts(NOW, current, seen) == row
    gone = decide(NOW, run([node("a"), node("b")], current), seen, RoundPolicy(2, 2))
    if gone.round is not None and not gone.round.ends:
        assert (gone.round.failed_starts, gone.round.waits) == (row, 4 if row else 0)


def test_the_row_is_in_the_record_of_the_round() -> None:
    for current in (OPEN, replace(OPEN, failed_starts=0, waits=0)):
        stored = KeyValue("x/round", current.to_json(), 1, 50, 1, 0)
        assert Round.from_kv(stored) == current
    assert b"waits" not in replace(OPEN, failed_starts=0, waits=0).to_json()
    assert b"failed_starts" not in replace(OPEN, failed_starts=0).to_json()


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, True),
        ({"round": 5}, True),
        ({"round": 4}, False),
        ({"round": 9}, False),
        ({"run": "other"}, False),
        ({"follows": True}, False),
    ],
)
def test_a_failure_counts_if_it_is_its_own_and_in_the_row(
    changes: dict[str, Any], *, counts: bool
) -> None:
    snapshot = Snapshot(9, Job(JobPolicy(1, 4), mod_revision=7), {"a": member("a")})
    listed = listing_of(snapshot)
    members = run_membership(snapshot, listed, "digits", OPEN, failures=fails("a", **changes))
    assert (set(members.failed), members.job_revision) == ({"a"} if counts else set(), 7)
    assert run_membership(snapshot, listed, "digits", Round(9)).failed == {}
