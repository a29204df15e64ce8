# SPDX-License-Identifier: Apache-2.0
"""What is told of jobs: what is new, each thing once, and a count where it is said again."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.verdict.states import STATES
from controller.cluster.events import (
    REPEAT_S,
    SILENCE_S,
    Series,
    after_write,
    noted,
    reported_up_to,
)
from controller.job_events import WARNINGS, JobEvent, job_events
from controller.jobs import JobState
from controller.leadership import LEASE_S, Sighting, next_step, sighting_after
from rdzv.keys import JobKeys
from rdzv.records.drain import Commit, Drain, LastCommit, Outcome
from rdzv.records.job import Happening, HistoryEntry, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import KeyValue
from tests.support.records import drain, member

KEYS = JobKeys("team", "digits")


def entry(what: Happening, name: str, revision: int, why: str = "why", **details: Any) -> KeyValue:
    written = HistoryEntry(what, name, why, 0.0, details)
    key = KEYS.history_entry(revision, name, what)
    return KeyValue(key, written.to_json(), revision, revision, 1, 0)


def view(
    revision: int, members: dict[str, int], *history: KeyValue, most: int = 4, **more: Any
) -> JobState:
    """A job of ``members``, by the revision at which each came."""
    job = Job(JobPolicy(1, most), mod_revision=1)
    records: dict[str, Member] = {
        name: replace(member(name, at, most=most), created_revision=at, version="0.2.0")
        for name, at in members.items()
    }
    snapshot = Snapshot(revision, job, records, **more)
    return JobState(KEYS, revision, snapshot, listing_of(snapshot), history)


def over(outcome: Outcome, **changes: Any) -> Drain:
    """A drain that has ended in revision 13."""
    return replace(drain("b", outcome), created_revision=9, mod_revision=13, **changes)


def told(before: JobState | None, now: JobState, since: int = 0) -> list[tuple[str, str]]:
    return [(one.reason, one.pod) for one in job_events(before, now, since)]


FORMER = view(10, {"a": 2, "b": 3})


def event_of(entry: KeyValue) -> JobEvent:
    """The one that comes of an entry."""
    (event,) = job_events(FORMER, view(14, {"a": 2, "b": 3}, entry), 0)
    return event


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (view(10, {"a": 2, "b": 3}), []),
        (view(11, {"a": 2, "b": 3, "c": 11}), [("Joined", "c")]),
        (view(11, {"a": 2, "b": 3, "c": 11}, most=2), [("Joined", "c"), ("Standby", "c")]),
        (view(12, {"a": 2}), [("Lost", "b")]),
        (view(12, {"a": 2}, entry("leave", "b", 12)), []),
        (view(12, {"a": 2, "b": 12}), []),  # the same pod, registered again
        (
            view(12, {"a": 2, "b": 3}, drains={"uid-b": replace(drain("b"), created_revision=12)}),
            [("Draining", "b")],
        ),
        (view(13, {"a": 2, "b": 3}, drains={"uid-b": over("expired")}), [("Expired", "b")]),
        (
            view(
                13,
                {"a": 2, "b": 3},
                drains={"uid-b": over("committed", step=46)},
                last_commit=LastCommit(46, 1, 1, mod_revision=13),
            ),
            [("Committed", ""), ("Committed", "b")],
        ),
        (view(13, {"a": 2, "b": 3}, last_commit=LastCommit(46, 1, 1, mod_revision=9)), []),
        (
            view(
                14,
                {"a": 2, "b": 3},
                entry("round", "a", 12, round=2, nodes=2),
                entry("quarantine", "b", 14, pod_uid="uid-b"),
                entry("round", "a", 9, round=1, nodes=2),
            ),
            [("Reformed", ""), ("Quarantined", "b")],
        ),
        (
            view(14, {"a": 2, "b": 3}, entry("failed", "b", 14, pod_uid="uid-b", round=7)),
            [("Failed", "b")],
        ),
    ],
)
def test_what_is_new_is_told(now: JobState, expected: list[tuple[str, str]]) -> None:
    assert told(FORMER, now) == expected
    assert told(now, now) == []


@pytest.mark.parametrize(
    ("took_s", "left_s", "short"),
    [(41.4, 25.0, True), (12.0, 25.0, False), (41.4, None, False), (0.0, 0.0, False)],
)
def test_a_save_longer_than_any_grace_is_told(
    took_s: float, left_s: float | None, short: bool
) -> None:
    saved = view(
        13,
        {"a": 2, "b": 3},
        commit=Commit(epoch=3, round=1, phase="done", step=46, took_s=took_s),
        last_commit=LastCommit(46, 1, 3, mod_revision=13),
    )
    (event,) = job_events(FORMER, saved, 0, left_s)
    end = (
        " in 41 s, longer than the 25 s that the shortest grace of a pod leaves: raise"
        " terminationGracePeriodSeconds"
    )
    assert event.message == "all ranks have saved step 46" + (end if short else "")


@given(st.data())
def test_a_later_leader_tells_what_was_not_told_and_nothing_twice(
    data: st.DataObject,
) -> None:
    """Of everything that the store dates: by revisions alone, however often leaders change."""
    dated = [
        entry("round", "a", at, round=at, nodes=2)
        if data.draw(st.booleans())
        else entry("quarantine", "a", at, pod_uid="uid-a")
        for at in range(5, 5 + data.draw(st.integers(0, 6)))
    ]
    joined = data.draw(st.dictionaries(st.sampled_from("abcdef"), st.integers(3, 20), max_size=6))
    cuts = sorted(data.draw(st.sets(st.integers(2, 21), max_size=4)) | {2, 30})
    pieces: list[JobEvent] = []
    for since, upto in pairwise(cuts):
        then = view(
            upto,
            {name: at for name, at in joined.items() if at <= upto},
            *(one for one in dated if one.mod_revision <= upto),
            most=9,
        )
        pieces += job_events(None, then, since)
    at_once = job_events(None, view(30, joined, *dated, most=9), 2)
    assert sorted(map(repr, pieces)) == sorted(map(repr, at_once))


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=40))
def test_a_pod_that_flaps_is_counted_and_written_at_times(
    steps: list[tuple[float, bool]],
) -> None:
    now, series = 0.0, None
    writes: list[float] = []
    counts: dict[str, int] = {}
    for revision, (rest_s, available) in enumerate(steps, 1):
        now += rest_s
        series = noted(now, series, f"e{revision}", f"lost {revision}", revision)
        if available and series.due_s <= now:
            writes.append(now)
            counts[series.name] = series.count
            series = after_write(now, series, series)
        assert reported_up_to(revision, [series]) == (
            revision if not series.owes else series.owed_revision - 1
        )
    if series is not None and series.owes:
        counts[series.name] = series.count
    assert sum(counts.values()) == len(steps)
    assert all(b - a >= REPEAT_S for a, b in pairwise(writes))


def test_what_is_not_written_is_not_told() -> None:
    series = noted(0.0, None, "e", "lost", 7)
    assert reported_up_to(9, [series]) == 6
    # Said again while that write was under way: it is owed from then on alone.
    more = noted(1.0, series, "f", "lost again", 9)
    assert reported_up_to(9, [after_write(2.0, more, series)]) == 7
    assert reported_up_to(9, [after_write(2.0, more, more)]) == 9
    # After a silence it is a new Event; the same news is none.
    assert noted(3.0, series, "f", "lost", 7) is series
    done = after_write(2.0, series, series)
    assert noted(2 + SILENCE_S + 1, done, "f", "lost", 30).name == "f"
    assert math.isinf(Series("e", "m", 1, written=1).due_s)


def test_a_lease_is_taken_once_its_holder_has_been_silent_by_our_own_clock() -> None:
    seen = sighting_after(None, 100.0, "one", "7")
    assert next_step(100.0, "one", seen)[0] == "renew"
    assert next_step(100 + LEASE_S - 1, "two", seen)[0] == "wait"
    assert next_step(100 + LEASE_S, "two", seen)[0] == "take"
    renewed = sighting_after(seen, 110.0, "one", "8")
    assert next_step(100 + LEASE_S, "two", renewed)[0] == "wait"
    assert sighting_after(renewed, 120.0, "one", "8") is renewed
    assert next_step(0.0, "two", Sighting("", "1", 0.0))[0] == "take"


def test_i9_a_wait_after_failed_starts_is_an_event_without_their_text() -> None:
    event = event_of(entry("wait", "a", 14, round=9, failed_starts=4, wait_s=40.0))
    said = "waits 40 s before round 9: 4 worlds in a row failed before a step was reported"
    assert (event.reason, event.message, event.pod_uid) == ("Waiting", said, "")


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        (
            "below min",
            "BelowMin",
            "below min: fewer than min pods can train; muster why digits says why, and what to do",
        ),
        ("training", "Training", "training: a world trains"),
    ],
)
def test_a_state_is_told_without_what_users_wrote(state: str, reason: str, said: str) -> None:
    event = event_of(entry("state", "a", 14, why="failing: KeyError: 'secret'", state=state))
    assert (event.reason, event.message, event.of_job) == (reason, said, True)


def test_the_event_of_a_stuck_job_names_the_rank() -> None:
    ranks = [[1, "b"], "?", [2, "b", 3]]
    event = event_of(entry("state", "a", 14, why="x", state="stuck", ranks=ranks))
    assert (event.reason, event.message) == (
        "Stuck",
        "stuck: ranks made steps, and make none any more: the others wait for rank 1 (b);"
        " muster why digits says why, and what to do",
    )


def test_a_state_that_no_table_has_is_left_out() -> None:
    entry_ = entry("state", "a", 14, state="on fire")
    assert job_events(FORMER, view(14, {"a": 2, "b": 3}, entry_), 0) == ()


def test_the_events_of_bad_states_are_warnings() -> None:
    bad = {one.event for one in STATES.values() if one.level in ("warning", "fault")}
    good = {one.event for one in STATES.values()} - bad
    assert bad <= WARNINGS
    assert not good & WARNINGS


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (
            {"round": 7, "rank": 0, "error": "RuntimeError", "in_a_row": 3},
            "b: rank 0 ended round 7 with RuntimeError, 3rd in a row",
        ),
        ({"round": 7, "rank": -1}, "b: a worker ended round 7 without a Python error"),
    ],
)
def test_i9_the_event_of_a_failure_has_its_type_alone(details: dict[str, Any], said: str) -> None:
    event = event_of(entry("failed", "b", 14, pod_uid="uid-b", **details))
    assert (event.reason, event.message, event.pod_uid) == ("Failed", said, "uid-b")
