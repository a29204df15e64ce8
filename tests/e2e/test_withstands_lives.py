# SPDX-License-Identifier: Apache-2.0
"""Real torchrun jobs that end, and are created again under the same name."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.support.training.drain_job import DRAINED_STATUS, draining_job, gone, released, terminate
from tests.support.training.job import FORM_TIMEOUT_S, Job, Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

RunJob = Callable[..., AbstractContextManager[Job]]

WAITS = "has no member but may come back: waiting to see"
"""What a sidecar says while it waits for three leases, where somebody may have died."""


def generation(job: Job) -> int:
    record = job.witness.sight.membership.job
    assert record is not None
    return record.generation


def all_launchers_end(job: Job) -> list[int]:
    """Wait until every torchrun has ended; returns their statuses."""
    launchers = [node.launcher for node in job.nodes.values() if node.launcher is not None]
    job.until(lambda: all(p.poll() is not None for p in launchers), 120, "every torchrun ends")
    return [p.wait() for p in launchers]


def ended_launchers(job: Job) -> list[Node]:
    return [
        node
        for node in job.nodes.values()
        if node.launcher is not None and node.launcher.poll() is not None
    ]


def test_closed_by_failure_it_comes_back_and_closed_by_success_it_stays_closed(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, slots=2, least=2, most=2, max_restarts=0) as job:
        job.add(2)
        first = job.world_of(job.nodes.values())
        job.fail_training()

        def has_failed() -> bool:
            """Rank 0's torchrun has ended; the other one has too, or asks for another world."""
            ended = len(ended_launchers(job))
            return ended == 2 or (ended == 1 and not job.round.complete)

        job.until(has_failed, 120, "all have left the world that failed")
        job.train_again()
        for node in ended_launchers(job):
            assert node.launcher is not None
            assert node.launcher.returncode == 1
            assert "RendezvousClosedError" not in node.launcher_log()
            job.start_launcher(node)
        world = job.world_of(job.nodes.values(), not_=first)
        assert generation(job) == 1
        job.stop_training()
        assert all_launchers_end(job) == [0, 0]
        job.until(lambda: job.round.closed == "success", 60, "it is closed by success")

        job.train_again()
        again = next(iter(job.nodes.values()))
        job.start_launcher(again)
        assert again.launcher is not None
        again.launcher.wait(FORM_TIMEOUT_S)
        assert "RendezvousClosedError" in again.launcher_log()
        assert job.steps.worlds()[-1] is world
        assert generation(job) == 1
        job.never_two_worlds()


def test_created_again_with_another_uid_it_starts_anew(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=2, most=2) as job:
        first = job.add(2, uid="first")
        world = job.world_of(job.nodes.values())
        job.stop_training()
        assert all_launchers_end(job) == [0, 0]
        job.train_again()

        # The pods of the former life are still there; they must not get in the way.
        second = job.add(2, uid="second")
        again = job.world_of(second, not_=world)
        assert generation(job) == 2
        names = {node.name for node in second}
        job.until(
            lambda: set(job.witness.sight.membership.members) == names, 60, "they are the members"
        )
        words = "created again with UID second"
        job.until(lambda: all(words in node.sidecar_log() for node in first), 60, "they tell")
        for node in first:
            assert node.sidecar is not None
            assert node.sidecar.poll() is None
            assert node.hosts() == sorted(other.name for other in first)
        job.goes_on(again)


def first_step(job: Job, node: Node) -> int:
    """The first step that was made on a node."""
    logs = job.steps.directory.glob(f"{node.name}.*")
    return min(int(log.read_text().split()[1]) for log in logs)


def test_created_again_with_an_empty_directory_it_trains_from_scratch(
    run_job: RunJob, embedded: list[str]
) -> None:
    # Nobody waits for a replacement of the only pod.
    let_go = {"MUSTER_BELOW_MIN": "commit"}
    with draining_job(run_job, embedded, least=1, most=1, sidecar_environ=let_go) as job:
        (former,) = job.add(uid="first")
        world = job.world_of([former])
        terminate(job, former)
        saved = released(job, former)
        assert saved.outcome == "committed"
        assert gone(job, former) == DRAINED_STATUS

        job.script_environ["CHECKPOINT_DIR"] = str(job.directory / "emptied")
        (present,) = job.add(uid="second")
        job.world_of([present], not_=world)
        assert first_step(job, present) == 1
        told = f"all ranks of a former life of this job have saved step {saved.step}, and there is"
        assert told in present.launcher_log()


def test_created_again_without_a_uid_after_everybody_left(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=1, most=2, lease_s=20.0) as job:
        job.add(2)
        job.world_of(job.nodes.values())
        job.stop_training()
        assert all_launchers_end(job) == [0, 0]
        for node in tuple(job.nodes.values()):
            job.stop_node(node)
        job.train_again()
        for node in job.add(2):
            assert WAITS not in node.sidecar_log()
        job.world_of(job.nodes.values())
        assert generation(job) == 2


def test_created_again_without_a_uid_after_everybody_died_it_waits_to_see(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=1, most=2) as job:
        nodes = job.add(2, launch=False)
        job.until(lambda: len(job.witness.sight.membership.members) == 2, 60, "both are members")
        for node in nodes:
            job.kill_node(node)
        job.until(lambda: not job.witness.sight.membership.members, 60, "their leases end")
        (again,) = job.add(launch=False)
        assert f"generation 1 {WAITS}" in again.sidecar_log()
        job.until(lambda: generation(job) == 2, 60, "the next life has begun")


def test_an_agent_without_restarts_does_not_end_a_job_that_lost_a_node(
    run_job: RunJob, embedded: list[str]
) -> None:
    # Natively, the first agent whose workers failed with the lost node closes the rendezvous.
    # The lease outlasts that failure: the agent is to fail, not to be told to form a new world.
    with run_job(embedded, least=2, most=3, lease_s=15.0) as job:
        first, second, third = job.add(3, launch=False)
        job.start_launcher(first)
        job.start_launcher(second, max_restarts=0)
        job.start_launcher(third)
        job.world_of(job.nodes.values())
        assert first.launcher is not None
        assert second.launcher is not None
        # Were it to leave the round first, the other agent would follow it, and not fail.
        first.launcher.send_signal(signal.SIGSTOP)
        job.kill_node(third)
        assert second.launcher.wait(90) == 1
        first.launcher.send_signal(signal.SIGCONT)
        assert job.round.closed == ""
        job.start_launcher(second)
        job.world_of([first, second])


def test_two_jobs_in_one_store_take_no_notice_of_each_other(
    run_job: RunJob, embedded: list[str]
) -> None:
    settings = {"least": 1, "most": 2}
    with run_job(embedded, **settings) as one, run_job(embedded, **settings) as other:
        for job in (one, other):
            job.add(2)
        world = one.world_of(one.nodes.values())
        since_s = time.monotonic()
        loser = other.world_of(other.nodes.values())
        other.kill_node(other.nodes[loser.workers[0].node])
        other.world_of(other.nodes.values())
        other.stop_training()
        assert all_launchers_end(other) == [0]
        one.undisturbed(world, since_s)
        one.until(
            lambda: set(one.witness.sight.membership.members) == set(one.nodes),
            60,
            "its members are its nodes",
        )
