# SPDX-License-Identifier: Apache-2.0
"""Pods of a real torchrun job are told to go: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agent.rundir.reports import read_ranks
from tests.support.training.job import (
    DRAINED_STATUS,
    STEPS_BETWEEN,
    Job,
    Notice,
    RunJob,
    draining_job,
)
from tests.support.training.pods import END_TIMEOUT_S, ROOT, Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


SLOW = {"DRAIN_LOOP_STEP_S": "0.7", "DRAIN_LOOP_SAVE_S": "2.5"}
"""So that each phase lasts long enough to be met; that of the saves is held until it has been."""
STEP_S = 0.05
AWAY_S = 20.0
FAILS_ONCE = {"DRAIN_LOOP_FAIL_SAVE": "0:1", "DRAIN_LOOP_ACCUMULATE": "2"}

_NEVER_HUNG = """
import dataclasses
from launcher_shim.c10d.rounds import decision_loop
_decide = decision_loop.decide_on_hang
def _patient(now, signs, policy):
    return _decide(now, signs, dataclasses.replace(policy, hung_s=3600.0))
decision_loop.decide_on_hang = _patient
"""

long = pytest.mark.long


def until_phase(job: Job, node: Node, phase: str) -> None:
    """Wait until the drain of ``node`` is in ``phase``: noted, or a phase of the commit."""

    def reached() -> bool:
        if job.drain_of(node) is None:
            return False
        commit = job.witness.sight.membership.commit
        return phase == "noted" or (commit is not None and commit.phase == phase)

    job.until(reached, 120, f"the drain of {node.name} is in phase {phase}")
    job.tell(f"phase {phase}")


def ends_drained(job: Job, leaver: Node) -> None:
    """Wait until the leaver has gone and the others train on."""
    assert job.gone(leaver) == DRAINED_STATUS
    job.goes_on(job.world_of(job.nodes.values()), 5)


# -- one after another, and at once


def test_i2_a_drain_before_all_ranks_have_begun_loses_no_step(
    run_job: RunJob, embedded: list[str], tmp_path: Path
) -> None:
    """It is granted without a save. Until the world has ended, nobody may begin a step of it."""
    # However long they are frozen, no torchrun is given up.
    (tmp_path / "sitecustomize.py").write_text(_NEVER_HUNG)
    environ = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with draining_job(run_job, embedded, least=1, most=2, sidecar_environ=environ) as job:
        late = job.directory / "late"
        late.mkdir()
        job.script_environ["DRAIN_LOOP_LATE"] = str(late)
        job.add(2)
        job.until((late / "waits").exists, 120, "all ranks but the last have begun")
        leaver = job.nodes[min(job.nodes)]
        with job.agents_frozen():
            job.sigterm(leaver)
            assert job.released(leaver).outcome == "uncommitted"
            (late / "begin").touch()
            job.until(lambda: all(map(takes_part, job.nodes.values())), 60, "all have begun")
            time.sleep(20 * STEP_S)
            assert job.steps.worlds() == []
        ends_drained(job, leaver)
        job.nothing_lost()


def takes_part(node: Node) -> bool:
    """Whether its rank has entered the loop."""
    ranks = read_ranks(node.run_dir / "progress")
    return [rank.drain for rank in ranks] == [True]


@long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("slots", "drains"), [(1, 15), (2, 5)])
def test_drains_in_a_row(run_job: RunJob, embedded: list[str], slots: int, drains: int) -> None:
    """By each way and at each place: fifteen are all of these once.

    Ten are proven in ``tests/world/test_drains.py``, in virtual time.
    """
    with draining_job(run_job, embedded, slots=slots, least=2, most=4) as job:
        job.a_row_of_drains(drains)


@pytest.mark.parametrize(
    ("notice", "shell", "wrapped"),
    [
        pytest.param(Job.sigterm, "{}", True, id="a shell"),
        pytest.param(Job.sigterm, "{}; echo it has ended with $?", True, id="a shell that stays"),
        pytest.param(Job.hold, "", False, id="its own entry point, with muster-hold"),
    ],
)
@long
def test_a_sigterm_that_would_be_swallowed_saves_and_arrives(
    run_job: RunJob, embedded: list[str], notice: Notice, shell: str, wrapped: bool
) -> None:
    with draining_job(run_job, embedded, least=1, most=2, wrapped=wrapped) as job:
        nodes = job.add(2, launch=False)
        for node in nodes:
            job.start_launcher(node, shell=shell)
        job.goes_on(job.world_of(nodes))
        notice(job, nodes[0])
        job.committed(nodes[0], ranks=2)
        status = job.gone(nodes[0])
        assert status == DRAINED_STATUS or not wrapped
        job.goes_on(job.world_of([nodes[1]]), 5)
        job.nothing_lost()


# -- while it goes on


@pytest.mark.parametrize("phase", ["noted", "hold", "commit", "done"])
@pytest.mark.parametrize("victim", ["the leaver's sidecar", "another sidecar", "the store"])
@long
def test_what_fails_in_the_middle(
    run_job: RunJob, embedded: list[str], victim: str, phase: str
) -> None:
    """A sidecar is killed, or the store is away for a while that is shorter than the lease."""
    settings: dict[str, Any] = {"least": 2, "most": 3, "script_environ": SLOW, "proxied": True}
    with draining_job(run_job, embedded, **settings) as job:
        job.trains(3)
        first, leaver, third = job.nodes.values()
        hit = leaver if victim == "the leaver's sidecar" else first
        if phase == "hold":
            job.freeze_sidecar(third)  # no vote of its pod: the hold lasts
        with job.saves_held() if phase == "commit" else nullcontext():
            job.terminate(leaver)
            until_phase(job, leaver, phase)
            if victim == "the store":
                job.cut_store(job.nodes.values())
            else:
                job.kill_sidecar(hit)
        if victim == "the store":
            time.sleep(AWAY_S)
            job.mend_store()
        else:
            job.start_sidecar(hit)
        job.resume(third)
        assert job.released(leaver).outcome == "committed"
        ends_drained(job, leaver)
        job.nothing_lost()


@long
@pytest.mark.parametrize("caught", [True, False])
def test_a_save_that_fails_once(run_job: RunJob, embedded: list[str], caught: bool) -> None:
    """It is tried again where the script goes on, and takes its round along where it does not."""
    environ = {**FAILS_ONCE, "DRAIN_LOOP_CATCH": str(int(caught))}
    with draining_job(run_job, embedded, script_environ=environ) as job:
        job.trains(3)
        leaver = job.nodes[min(job.nodes)]
        job.terminate(leaver)
        assert job.released(leaver).outcome == ("committed" if caught else "uncommitted")
        failed = [c for _, c in job.witness.commits if c.phase == "void"]
        assert "could not save" in failed[0].reason
        assert "No space left" in failed[0].reason
        ends_drained(job, leaver)
        if caught:
            job.nothing_lost()


@pytest.mark.parametrize("grace_s", [5.0, 15.0, 30.0])
@long
def test_a_save_that_outlasts_the_grace_is_given_up(
    run_job: RunJob, embedded: list[str], grace_s: float
) -> None:
    """That it is in time, is proven in ``tests/world/test_drains.py``."""
    with draining_job(
        run_job,
        embedded,
        least=1,
        most=2,
        sidecar_environ={"MUSTER_GRACE_S": f"{grace_s:g}"},
    ) as job:
        job.trains(2)
        leaver = job.nodes[min(job.nodes)]
        with job.saves_held():
            # Both notices: a pod of which one is stopped alone may stay, and takes its drain back.
            job.terminate(leaver)
            assert job.released(leaver).outcome == "expired"
            words = "SIGTERM goes to the command"
            job.until(lambda: words in leaver.launcher_log(), 120, "SIGTERM passes")
        drain = job.released(leaver)
        assert drain.seconds_left is not None
        assert drain.seconds_left <= grace_s
        # What was made since the last commit is lost, and training goes on.
        ends_drained(job, leaver)
        assert job.outcomes() == ["expired"]
        job.never_two_worlds()


def test_a_drain_that_is_cancelled_after_its_release_lets_the_pod_train_again(
    run_job: RunJob, embedded: list[str]
) -> None:
    """Its torchrun has idled in the world that it left."""
    with draining_job(run_job, embedded, least=1, most=2) as job:
        world = job.trains(2)
        node = job.nodes[min(job.nodes)]
        told, _ = job.by_hand(node, "--wait").communicate(timeout=END_TIMEOUT_S)
        assert "released" in told
        others = [one for one in job.nodes.values() if one is not node]
        job.goes_on(job.world_of(others, not_=world), STEPS_BETWEEN)
        cancelling = job.by_hand(node, "--cancel")
        told, _ = cancelling.communicate(timeout=END_TIMEOUT_S)
        assert cancelling.returncode == 0, told
        job.goes_on(job.world_of(job.nodes.values()), STEPS_BETWEEN)
        job.nothing_lost()
