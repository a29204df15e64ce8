# SPDX-License-Identifier: Apache-2.0
"""Where a drain stands, as everybody is told."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from rdzv.drain.standing import DrainPhase, phase_of
from rdzv.records.drain import Commit, Drain, Outcome, Phase
from rdzv.snapshot import Snapshot

DRAIN = Drain("uid-b", "b", "spot", "sigterm")
HOLD = Commit(4, "run", 3, "hold", leaving=("uid-a", "uid-b"), reason="holding the ranks")


def told(commit: Commit | None, drain: Drain = DRAIN) -> DrainPhase:
    return phase_of(Snapshot(9, commit=commit), drain)


@pytest.mark.parametrize(
    ("commit", "name", "says"),
    [
        (None, "draining", "b is delisted, and no save has begun"),
        (replace(HOLD, leaving=("uid-a",)), "draining", "b is delisted, and no save has begun"),
        (HOLD, "agreeing", "asked to stop at their next step boundary"),
        (replace(HOLD, phase="commit", step=7), "saving", "all ranks save at step 7"),
        (replace(HOLD, phase="done", step=7), "saved", "step 7 is saved: holding the ranks"),
        (replace(HOLD, phase="void", reason="c could not save"), "draining", "c could not save"),
        (replace(HOLD, phase="idle", reason=""), "draining", "b is delisted"),
    ],
)
def test_before_its_end_a_drain_stands_where_the_commit_does(
    commit: Commit | None, name: str, says: str
) -> None:
    phase = told(commit)
    assert (phase.name, phase.outcome) == (name, "")
    assert says in phase.sentence


@pytest.mark.parametrize("phase", get_args(Phase))
def test_while_the_job_is_finishing_no_drain_speaks_of_a_save(phase: Phase) -> None:
    commit = replace(HOLD, phase=phase, step=9)
    ends = phase_of(Snapshot(9, commit=commit), DRAIN, finishing=True)
    assert ends == DrainPhase("finishing", "the job is finishing: nothing is to be saved")
    served = replace(commit, phase="done", saved=("uid-b",))
    assert phase_of(Snapshot(9, commit=served), DRAIN, finishing=True).name == "saved"


@pytest.mark.parametrize("phase", get_args(Phase))
@pytest.mark.parametrize("outcome", [outcome for outcome in get_args(Outcome) if outcome])
def test_an_outcome_is_the_end_wherever_the_commit_stands(phase: Phase, outcome: Outcome) -> None:
    ended = told(replace(HOLD, phase=phase, step=9), replace(DRAIN, outcome=outcome, step=7))
    assert (ended.name, ended.outcome, ended.step) == ("released", outcome, 7)
    assert "b" in ended.sentence.split()


def test_a_leave_that_is_granted_is_the_end_although_its_record_does_not_say_so_yet() -> None:
    granted = replace(HOLD, phase="done", step=7, granted=("uid-b",))
    assert told(granted).outcome == "uncommitted"
    saved = replace(granted, saved=("uid-b",))
    assert (told(saved).outcome, told(saved).step) == ("committed", 7)


def test_a_launcher_that_has_let_a_pod_go_has_no_step_to_tell() -> None:
    ended = told(None, replace(DRAIN, outcome="committed"))
    assert ended.sentence == "b may go: its launcher has let it go, and no work is lost"
