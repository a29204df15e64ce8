# SPDX-License-Identifier: Apache-2.0
"""A real torchrun job whose bounds change while it trains, and that is paused."""

from __future__ import annotations

import pytest

from tests.support.training.job import FORM_TIMEOUT_S, RunJob, draining_job

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def test_bounds_change_by_a_roll_out_and_by_hand_and_no_step_is_lost(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, least=1, most=1) as job:
        one = job.add()
        job.goes_on(job.world_of(one), 5)
        wider = job.add(environ={"MUSTER_MAX": "2"})
        two = job.world_of([*one, *wider])
        job.goes_on(two, 5)
        assert ": its template is the newest: max is 2 (before: 1)" in job.muster("history")

        assert "1 of 2 members will stand by" in job.muster("set", "--max", "1")
        fewer = job.until_world(
            lambda world: len(world.nodes) == 1, FORM_TIMEOUT_S, "one steps alone", two
        )
        job.goes_on(fewer, 5)

        said = job.muster("pause", "--wait", "--reason", "night")
        assert said.splitlines()[-1].startswith("paused     no world trains")
        assert "paused since" in job.muster("status")
        job.muster("resume")
        again = job.until_world(
            lambda world: len(world.nodes) == 1, FORM_TIMEOUT_S, "one goes on", fewer
        )
        job.goes_on(again, 5)
        job.nothing_lost()


def test_i11_nodes_that_keep_coming_wait_for_the_first_step_of_a_world_that_loads(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, least=2, most=4) as job:
        late = job.directory / "late"
        late.mkdir()
        job.script_environ["DRAIN_LOOP_LATE"] = str(late)
        two = job.add(2)
        job.until((late / "waits").exists, FORM_TIMEOUT_S, "all ranks but the last have begun")
        job.until(lambda: job.round.progress == "loads", FORM_TIMEOUT_S, "that is on record")
        more = [*job.add(), *job.add()]
        waits = "2 more ask to join a world of 2: waiting for the first step of its ranks"
        job.until(lambda: waits in two[0].sidecar_log(), FORM_TIMEOUT_S, "the newcomers wait")
        assert job.round.number == 0
        (late / "begin").touch()
        job.world_of([*two, *more])
        assert len(job.steps.worlds()) == 2
        assert job.round.number == 1
        job.nothing_lost()
