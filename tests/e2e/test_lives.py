# SPDX-License-Identifier: Apache-2.0
"""Real torchrun jobs that end, and are created again under the same name."""

from __future__ import annotations

import pytest

from tests.support.training.job import DRAINED_STATUS, FORM_TIMEOUT_S, RunJob, draining_job
from tests.support.training.pods import Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def test_created_again_with_an_empty_directory_it_trains_from_scratch(
    run_job: RunJob, embedded: list[str]
) -> None:
    # Nobody waits for a replacement of the only pod.
    let_go = {"MUSTER_BELOW_MIN": "commit"}
    with draining_job(run_job, embedded, least=1, most=1, sidecar_environ=let_go) as job:
        (former,) = job.add(uid="first")
        world = job.world_of([former])
        job.terminate(former)
        step = job.committed(former, ranks=1)
        assert job.gone(former) == DRAINED_STATUS

        job.script_environ["CHECKPOINT_DIR"] = str(job.directory / "emptied")
        (present,) = job.add(uid="second")
        job.world_of([present], not_=world)
        assert job.first_step(present) == 1
        told = f"an earlier job of this name committed step {step}, but there is"
        assert told in present.launcher_log()


@pytest.mark.long
def test_all_pods_are_drained_and_the_job_created_again_goes_on_from_that_step(
    run_job: RunJob, embedded: list[str]
) -> None:
    # The save is long enough for both to be told meanwhile; below min both stay to the deadline.
    with draining_job(
        run_job,
        embedded,
        least=2,
        most=2,
        script_environ={"DRAIN_LOOP_SAVE_S": "1"},
        sidecar_environ={"MUSTER_GRACE_S": "30"},
    ) as job:
        nodes = job.add(2, uid="first")
        job.goes_on(job.world_of(nodes))
        for node in nodes:
            job.sigterm(node)
        step = job.committed(*nodes, ranks=2)
        for node in nodes:
            assert job.gone(node) == DRAINED_STATUS
        again = job.add(2, uid="second")
        job.goes_on(job.world_of(again))
        assert {job.first_step(node) for node in again} == {step + 1}


@pytest.mark.long
def test_closed_by_failure_it_comes_back_and_closed_by_success_it_stays_closed(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, slots=2, least=2, most=2, max_restarts=0) as job:
        job.add(2)
        first = job.world_of(job.nodes.values())
        job.fail_training()

        def ended() -> list[Node]:
            return [n for n in job.nodes.values() if n.launcher and n.launcher.poll() is not None]

        # Rank 0's torchrun has ended; the other one has too, or asks for another world.
        job.until(
            lambda: len(ended()) == 2 or (ended() and not job.round.complete),
            120,
            "all have left the world that failed",
        )
        job.train_again()
        for node in ended():
            assert node.launcher is not None
            assert node.launcher.returncode == 1
            assert "RendezvousClosedError" not in node.launcher_log()
            job.start_launcher(node)
        world = job.world_of(job.nodes.values(), not_=first)
        assert job.generation == 1
        job.stop_training()
        assert job.launchers_end() == [0, 0]
        job.until(lambda: job.round.closed == "success", 60, "it is closed by success")

        job.train_again()
        again = next(iter(job.nodes.values()))
        job.start_launcher(again)
        assert again.launcher is not None
        again.launcher.wait(FORM_TIMEOUT_S)
        assert "RendezvousClosedError" in again.launcher_log()
        assert job.steps.worlds()[-1] is world
        assert job.generation == 1
        job.never_two_worlds()


@pytest.mark.long
def test_created_again_with_another_uid_it_starts_anew_beside_the_former_pods(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=2, most=2) as job:
        first = job.add(2, uid="first")
        world = job.world_of(first)
        job.stop_training()
        assert job.launchers_end() == [0, 0]
        job.train_again()
        second = job.add(2, uid="second")
        again = job.world_of(second, not_=world)
        assert job.generation == 2
        job.until_members(*second)
        words = "created again with UID second"
        job.until(lambda: all(words in node.sidecar_log() for node in first), 60, "they tell")
        for node in first:
            assert node.sidecar is not None
            assert node.sidecar.poll() is None
            assert sorted(node.hosts()) == sorted(other.name for other in first)
        job.goes_on(again)
