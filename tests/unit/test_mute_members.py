# SPDX-License-Identifier: Apache-2.0
"""A member that never votes keeps newcomers waiting for three attempts and a periodic save.

Attempts go on meanwhile: once it votes again, all save, and no step is lost.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.verdict.runs import RunView
from agent.verdict.view import JobView
from launcher_shim.c10d.rounds.records import Round
from rdzv.drain.decision import DrainDecision, decide
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy, LiveRound, observe
from rdzv.records.drain import Commit, Drain, LastCommit, Vote
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import PodSaves
from rdzv.snapshot import Snapshot, listing_of
from tests.support.records import kv, member

POLICY = DrainPolicy()
ROUND = LiveRound("run", 3, True, ("a", "b", "c"), reforms="join", asking=frozenset("d"))
HOLD = Commit(5, "run", 3, "hold", joins=True, failures=2, missed=2, mod_revision=60)
TRIED = replace(HOLD, phase="void", failures=3, missed=3, mute=("b",))
GIVEN_UP = replace(TRIED, failures=8, missed=8)


class Sidecar:
    """One sidecar's decisions; ``saved``: the steps that members report as saved, and are at."""

    def __init__(self, commit: Commit, *drains: Drain) -> None:
        self.commit = commit
        self.drains = {drain.pod_uid: drain for drain in drains}
        self.saved: dict[str, tuple[int, int]] = {}
        self.due_s: dict[str, float] = {}
        self.last_job_uid = "uid-of-the-job"
        self._seen = DrainObservations()

    def decide(self, now: float, votes: str = "") -> DrainDecision:
        membership = Snapshot(
            90,
            Job(JobPolicy(1, 4), uid="uid-of-the-job", mod_revision=7),
            {name: member(name, at) for at, name in enumerate("abcd", 1)},
            drains=self.drains,
            commit=self.commit,
            last_commit=LastCommit(20, 3, 4, run="run", job_uid=self.last_job_uid),
        )
        snapshot = DrainingSnapshot(
            membership,
            listing_of(membership),
            ROUND,
            {name: Vote(self.commit.epoch, 3, f"uid-{name}", 40) for name in votes},
            "uid-a",
            revision=90,
            saves=[
                PodSaves(name, f"uid-{name}", "run", 3, (step,), step, at)
                for name, (step, at) in self.saved.items()
            ],
        )
        self._seen = observe(now, self._seen, snapshot, self.due_s)
        return decide(now, snapshot, self._seen, POLICY)


def test_who_did_not_vote_is_on_record() -> None:
    one = Sidecar(HOLD)
    one.decide(0, "ac")
    failed = one.decide(10, "ac").commit
    assert failed is not None
    assert (failed.phase, failed.failures, failed.missed, failed.mute) == ("void", 3, 3, ("b",))
    assert Commit.from_kv(kv("commit", 1, failed.to_json())) == replace(failed, mod_revision=1)
    voted = Sidecar(replace(HOLD, mute=("b",))).decide(0, "abc").commit
    assert voted is not None
    assert (voted.phase, voted.missed, voted.mute) == ("commit", 0, ())
    assert b"mute" not in voted.to_json()
    assert b"missed" not in voted.to_json()


def test_a_failed_save_is_no_missed_vote() -> None:
    after_two_failed_saves = replace(HOLD, failures=2, missed=0)
    one = Sidecar(after_two_failed_saves)
    one.decide(0, "ac")
    failed = one.decide(10, "ac").commit
    assert failed is not None
    assert (failed.failures, failed.missed) == (3, 1)
    one = Sidecar(failed)
    one.saved = {"a": (30, 33), "c": (30, 30)}
    one.decide(0)
    one.saved = {"a": (40, 41), "c": (40, 43)}
    again = one.decide(5).commit
    assert again is not None
    assert again.phase == "hold"


def test_i11_after_three_attempts_a_join_waits_for_the_next_save_of_all_others() -> None:
    one = Sidecar(TRIED)
    one.saved = {"a": (30, 33), "c": (30, 30)}
    for now in (0, 10, 19):
        waits = one.decide(now)
        assert waits.commit is None
        assert waits.reason == (
            "b did not vote (3 votes in a row were missed): waiting for a save of all others, or"
            " another attempt"
        )
        assert waits.wake_at_s == min(now + 5, 20)
    one.saved["a"] = (40, 41)
    assert one.decide(19).commit is None
    one.saved["c"] = (40, 43)
    let_in = one.decide(19).commit
    assert let_in is not None
    assert (let_in.refused, let_in.joins, let_in.mute) == (True, True, ("b",))
    assert let_in.reason == (
        "b did not vote (3 votes in a row were missed): newcomers join without a save;"
        " up to 23 steps since step 20 are made again"
    )


def test_i10_attempts_go_on_and_lose_nothing_once_all_vote() -> None:
    """A disk that hung for as long as three attempts took."""
    one = Sidecar(TRIED)
    one.decide(0)
    again = one.decide(20).commit
    assert again is not None
    assert (again.phase, again.epoch) == ("hold", 6)
    one.commit = again
    one.saved = {"a": (40, 41), "c": (40, 43)}
    assert one.decide(20).commit is None, "the others save while the vote is open"
    voted = one.decide(21, "abc").commit
    assert voted is not None
    assert (voted.phase, voted.refused) == ("commit", False)


def test_i11_attempts_without_that_vote_end_within_ten_minutes_of_the_third() -> None:
    one, now = Sidecar(TRIED), 0.0
    while not one.commit.refused:
        commit = one.decide(now, "ac").commit
        one.commit, now = (one.commit, now + 1.0) if commit is None else (commit, now)
    assert now <= 600
    assert (one.commit.missed, one.commit.mute, one.commit.joins) == (8, ("b",), True)


@pytest.mark.parametrize(
    ("saved", "repeated"),
    [
        ({"a": (30, 90), "c": (30, 30)}, "up to 70 steps since step 20 are made again"),
        ({"a": (30, 90)}, "up to 70 steps since step 20 are made again"),
        ({}, "the steps since the last save are made again"),
    ],
)
def test_i11_after_eight_attempts_a_join_waits_for_no_save(
    saved: dict[str, tuple[int, int]], repeated: str
) -> None:
    one = Sidecar(GIVEN_UP)
    one.saved = saved
    let_in = one.decide(0).commit
    assert let_in is not None
    assert let_in.refused
    assert let_in.reason.endswith(f"newcomers join without a save; {repeated}")


def test_steps_of_a_former_life_are_no_steps_of_this_one() -> None:
    one = Sidecar(GIVEN_UP)
    one.saved, one.last_job_uid = {"a": (30, 33), "c": (30, 30)}, "uid-of-the-former"
    let_in = one.decide(0).commit
    assert let_in is not None
    assert let_in.reason.endswith("; up to 33 steps since step 0 are made again")


@pytest.mark.parametrize("tried", [replace(TRIED, missed=2), replace(GIVEN_UP, mute=())])
def test_before_that_and_if_all_have_voted_another_attempt_follows(tried: Commit) -> None:
    one = Sidecar(tried)
    one.saved = {"a": (30, 33), "c": (30, 30)}
    one.decide(0)
    one.saved = {"a": (40, 41), "c": (40, 43)}
    again = one.decide(240).commit
    assert again is not None
    assert again.phase == "hold"


def test_i10_a_leaver_with_a_deadline_keeps_trying_until_then() -> None:
    one = Sidecar(TRIED, Drain("uid-a", "a", "spot", "sigterm", seconds_left=100.0))
    one.decide(0)
    again = one.decide(20).commit
    assert again is not None
    assert again.phase == "hold"


def test_the_one_that_does_not_vote_may_be_drained_by_hand() -> None:
    one = Sidecar(GIVEN_UP, Drain("uid-b", "b", "its disk is full", "operator"))
    let_go = one.decide(0).commit
    assert let_go is not None
    assert (let_go.refused, let_go.leaving) == (True, ("uid-b",))


def test_the_status_names_who_does_not_vote() -> None:
    membership = Snapshot(90, Job(JobPolicy(1, 4)), {}, commit=TRIED)
    run = RunView("run", Round(3, True), ())
    view = JobView("team", "digits", membership, listing_of(membership), (run,), (), {}, {})
    assert view.mute == (
        "b did not vote on a save (3 votes in a row were missed): newcomers wait (see the log of"
        " its sidecar; its run directory may take no writes)"
    )
    once = replace(membership, commit=replace(TRIED, missed=2))
    assert JobView("t", "d", once, view.listing, (run,), (), {}, {}).mute == ""
    gone = RunView("run", Round(4, True), ())
    assert JobView("t", "d", membership, view.listing, (gone,), (), {}, {}).mute == ""
