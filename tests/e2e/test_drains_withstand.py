# SPDX-License-Identifier: Apache-2.0
"""Drains of a real torchrun job while sidecars die, the store is away, and time runs out."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import pytest

from tests.support.training import drain_job as drills
from tests.support.training.drain_job import (
    DRAINED_STATUS,
    drain_of,
    draining_job,
    gone,
    nothing_lost,
    released,
)
from tests.support.training.job import Job, Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(500)]

RunJob = Callable[..., AbstractContextManager[Job]]

SLOW = {"DRAIN_LOOP_STEP_S": "0.7", "DRAIN_LOOP_SAVE_S": "2.5"}
"""So that each phase lasts long enough to be met; that of the saves is held until it has been."""

STALL_S = 0.5
"""Nobody who looks every 0.05 s is kept from it for so long, unless the machine stands still."""

long = pytest.mark.long


def until_phase(job: Job, node: Node, phase: str) -> None:
    """Wait until the drain of ``node`` is in ``phase``: noted, or a phase of the commit."""

    def reached() -> bool:
        if drain_of(job, node) is None:
            return False
        commit = job.witness.sight.membership.commit
        return phase == "noted" or (commit is not None and commit.phase == phase)

    job.until(reached, 120, f"the drain of {node.name} is in phase {phase}")
    job.tell(f"phase {phase}")


def trains(job: Job, nodes: int) -> None:
    """Start a job, and wait until it has made steps."""
    job.add(nodes)
    job.goes_on(job.world_of(job.nodes.values()), 5)


def ran_s(job: Job, since_s: float) -> float:
    """The time since then, less that in which the machine let nobody run."""
    now_s = time.monotonic()
    return now_s - since_s - job.stood_still_s(since_s, now_s)


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        ("the leaver's", "commit"),
        pytest.param("another", "hold", marks=long),
        pytest.param("the leaver's", "noted", marks=long),
        pytest.param("the leaver's", "hold", marks=long),
        pytest.param("the leaver's", "done", marks=long),
        pytest.param("another", "noted", marks=long),
        pytest.param("another", "commit", marks=long),
        pytest.param("another", "done", marks=long),
    ],
)
def test_a_sidecar_is_killed_in_the_middle(
    run_job: RunJob, embedded: list[str], victim: str, phase: str
) -> None:
    with draining_job(
        run_job,
        embedded,
        least=2,
        most=3,
        script_environ=SLOW,
        lease_s=30.0,
    ) as job:
        trains(job, 3)
        first, *others = sorted(job.nodes)
        leaver = job.nodes[others[0]]
        hit = leaver if victim == "the leaver's" else job.nodes[first]
        third = job.nodes[others[1]]
        if phase == "hold":
            job.freeze_sidecar(third)  # no vote of its pod: the hold lasts
        with drills.saves_held(job) if phase == "commit" else nullcontext():
            drills.terminate(job, leaver)
            until_phase(job, leaver, phase)
            job.kill_sidecar(hit)
        job.start_sidecar(hit)
        job.resume(third)
        assert released(job, leaver).outcome == "committed"
        assert gone(job, leaver) == DRAINED_STATUS
        job.goes_on(job.world_of(job.nodes.values()), 5)
        nothing_lost(job)


@pytest.mark.parametrize(
    ("phase", "away_s"),
    [
        ("commit", 6.0),
        pytest.param("noted", 20.0, marks=long),
        pytest.param("hold", 20.0, marks=long),
        pytest.param("commit", 20.0, marks=long),
        pytest.param("done", 20.0, marks=long),
    ],
)
def test_the_store_is_away_in_the_middle(
    run_job: RunJob, embedded: list[str], phase: str, away_s: float
) -> None:
    with draining_job(
        run_job,
        embedded,
        least=2,
        most=3,
        script_environ=SLOW,
        proxied=True,
        lease_s=30.0,
    ) as job:
        trains(job, 3)
        leaver = job.nodes[sorted(job.nodes)[1]]
        with drills.saves_held(job) if phase == "commit" else nullcontext():
            drills.terminate(job, leaver)
            until_phase(job, leaver, phase)
            job.cut_store(job.nodes.values())
        away_until_s = time.monotonic() + away_s
        job.until(lambda: time.monotonic() >= away_until_s, away_s + 60, "the store is away")
        job.mend_store()
        assert released(job, leaver).outcome == "committed"
        assert gone(job, leaver) == DRAINED_STATUS
        job.goes_on(job.world_of(job.nodes.values()), 5)
        nothing_lost(job)


@pytest.mark.parametrize(
    "shell", ["{}", pytest.param("{}; echo the command has ended with $?", marks=long)]
)
def test_a_sigterm_that_a_shell_would_swallow_saves_and_arrives(
    run_job: RunJob, embedded: list[str], shell: str
) -> None:
    with draining_job(run_job, embedded, least=1, most=2) as job:
        nodes = job.add(2, launch=False)
        for node in nodes:
            job.start_launcher(node, shell=shell)
        world = job.world_of(nodes)
        job.goes_on(world)
        drills.sigterm(job, nodes[0])
        drain = drills.released_soon(job, nodes[0])
        assert drain.outcome == "committed"
        assert drain.step is not None
        drills.all_saved(job, drain.step, range(2))
        assert gone(job, nodes[0]) == DRAINED_STATUS
        job.goes_on(job.world_of([nodes[1]]), 5)
        nothing_lost(job)


def test_muster_hold_holds_the_sigterm_of_a_container_with_its_own_entry_point(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, least=1, most=3, wrapped=False) as job:
        trains(job, 3)
        for name in sorted(job.nodes)[:2]:
            node = job.nodes[name]
            holding = drills.hold(job, node)
            assert holding.wait(120) == 0
            assert drills.released_soon(job, node).outcome == "committed"
            assert node.launcher is not None
            node.launcher.terminate()
            gone(job, node)
            job.goes_on(job.world_of(job.nodes.values()), 5)
        nothing_lost(job)


@pytest.mark.parametrize(
    "grace_s", [pytest.param(5.0, marks=long), 15.0, pytest.param(30.0, marks=long)]
)
def test_a_save_that_outlasts_the_grace_is_given_up_in_time(
    run_job: RunJob, embedded: list[str], grace_s: float
) -> None:
    """The reserve is a third of the grace, 1 to 5 s: then SIGTERM passes, whatever is going on."""
    reserve_s = max(1.0, min(5.0, grace_s / 3))
    with draining_job(
        run_job,
        embedded,
        least=1,
        most=2,
        script_environ={"DRAIN_LOOP_SAVE_S": f"{grace_s + 20:g}"},
        sidecar_environ={"MUSTER_GRACE_S": f"{grace_s:g}"},
    ) as job:
        trains(job, 2)
        leaver = job.nodes[sorted(job.nodes)[0]]
        looks_s = [time.monotonic()]
        drills.sigterm(job, leaver)

        def passed() -> bool:
            looks_s.append(time.monotonic())
            return "SIGTERM goes to the command" in leaver.launcher_log()

        job.until(passed, 120, "SIGTERM passes")
        took_s = time.monotonic() - looks_s[0]
        stood_still_s = sum(b - a for a, b in pairwise(looks_s) if b - a > STALL_S)
        assert took_s >= grace_s - reserve_s - 0.2
        assert took_s - stood_still_s < grace_s
        assert gone(job, leaver) == DRAINED_STATUS
        drain = released(job, leaver)
        assert drain.outcome == "expired"
        assert drain.seconds_left is not None
        assert drain.seconds_left - drain.reserve_s <= grace_s - reserve_s
        assert [entry["details"]["outcome"] for entry in drills.history(job)] == ["expired"]
        # What was made since the last commit is lost, and training goes on.
        job.goes_on(job.world_of(job.nodes.values()), 5)
        job.never_two_worlds()


@pytest.mark.parametrize("grace_s", [pytest.param(g, marks=long) for g in (5.0, 15.0, 30.0)])
def test_a_grace_that_suffices(run_job: RunJob, embedded: list[str], grace_s: float) -> None:
    with draining_job(
        run_job,
        embedded,
        least=1,
        most=2,
        script_environ={"DRAIN_LOOP_SAVE_S": "1"},
        sidecar_environ={"MUSTER_GRACE_S": f"{grace_s:g}"},
    ) as job:
        trains(job, 2)
        leaver = job.nodes[sorted(job.nodes)[0]]
        drills.terminate(job, leaver)
        asked_s = time.monotonic()
        assert leaver.launcher is not None
        leaver.launcher.wait(drills.END_TIMEOUT_S)
        assert ran_s(job, asked_s) < grace_s
        assert gone(job, leaver) == DRAINED_STATUS
        assert released(job, leaver).outcome == "committed"
        job.goes_on(job.world_of(job.nodes.values()), 5)
        nothing_lost(job)


@long
def test_a_drain_that_is_cancelled_while_all_save_disturbs_nobody(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, least=1, most=2) as job:
        nodes = job.add(2)
        world = job.world_of(nodes)
        with drills.saves_held(job):
            waiting = drills.by_hand(job, nodes[0], "--wait")
            until_phase(job, nodes[0], "commit")
            cancelling = drills.by_hand(job, nodes[0], "--cancel")
            told, _ = cancelling.communicate(timeout=60)
        assert cancelling.returncode == 0, told
        said, _ = waiting.communicate(timeout=60)
        assert waiting.returncode == 4, said
        job.goes_on(world, 20)
        assert job.steps.worlds()[-1] is world
        nothing_lost(job)


def test_all_pods_are_drained_and_the_job_created_again_goes_on_from_that_step(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(
        run_job,
        embedded,
        least=2,
        most=2,
        script_environ={"DRAIN_LOOP_SAVE_S": "1"},  # long enough for both to be told meanwhile
        # Below min both stay to the deadline; it comes before training would go on meanwhile.
        sidecar_environ={"MUSTER_GRACE_S": "30"},
    ) as job:
        nodes = job.add(2, uid="first")
        job.goes_on(job.world_of(nodes))
        for node in nodes:
            drills.sigterm(job, node)
        drains = [released(job, node) for node in nodes]
        assert {drain.outcome for drain in drains} == {"committed"}
        assert len({drain.step for drain in drains}) == 1
        for node in nodes:
            assert gone(job, node) == DRAINED_STATUS
        again = job.add(2, uid="second")
        job.goes_on(job.world_of(again))
        nothing_lost(job)


@long
@pytest.mark.parametrize("below_min", ["hold", "commit"])
def test_below_min_all_save_at_once_and_the_policy_says_when_one_goes(
    run_job: RunJob, embedded: list[str], below_min: str
) -> None:
    environ = {"MUSTER_GRACE_S": "15", "MUSTER_BELOW_MIN": below_min}
    with draining_job(run_job, embedded, least=2, most=3, sidecar_environ=environ) as job:
        trains(job, 2)
        leaver = job.nodes[sorted(job.nodes)[0]]
        told_s = time.monotonic()
        drills.sigterm(job, leaver)
        assert released(job, leaver).outcome == "committed"
        took_s = time.monotonic() - told_s
        assert took_s > 9 if below_min == "hold" else ran_s(job, told_s) < 3
        gone(job, leaver)
        job.add()
        job.goes_on(job.world_of(job.nodes.values()), 5)
        nothing_lost(job)


@long
def test_a_replacement_ends_the_hold_below_min(run_job: RunJob, embedded: list[str]) -> None:
    environ = {"MUSTER_GRACE_S": "60"}
    with draining_job(run_job, embedded, least=2, most=3, sidecar_environ=environ) as job:
        trains(job, 2)
        leaver = job.nodes[sorted(job.nodes)[0]]
        told_s = time.monotonic()
        drills.sigterm(job, leaver)
        until_phase(job, leaver, "done")
        job.add()
        assert released(job, leaver).outcome == "committed"
        assert time.monotonic() - told_s < 30
        gone(job, leaver)
        job.goes_on(job.world_of(job.nodes.values()), 5)
        nothing_lost(job)
