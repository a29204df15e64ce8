# SPDX-License-Identifier: Apache-2.0
"""What a pod of several ranks says of them in a world that changes in place."""

from __future__ import annotations

import json

import pytest

from agent.world_report import report_of, shown
from launcher_shim.c10d.rounds.records import Seat
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import RankInWorld, RankProgress
from rdzv.records.world import WorldChange, WorldReport
from rdzv.world import WorldPolicy, WorldSnapshot, decide

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
