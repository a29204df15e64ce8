# SPDX-License-Identifier: Apache-2.0
"""Pods are told to go, under a real torchrun: nothing is lost, nothing is trained twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest

from tests.e2e import drain_job as drills
from tests.e2e.drain_job import DRAINED_STATUS, draining_job, gone, nothing_lost, released
from tests.e2e.job import Job, Node
from tests.e2e.step_log import World

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

RunJob = Callable[..., AbstractContextManager[Job]]

STEPS_BETWEEN = 10


def drain_and_replace(
    job: Job, world: World, leavers: Sequence[Node], notice: Callable[[Job, Node], object]
) -> World:
    """Tell ``leavers`` to go, all at once; others come in their place; the next world steps."""
    commits = len(job.witness.commits)
    for node in leavers:
        notice(job, node)
    drains = [released(job, node) for node in leavers]
    assert {drain.outcome for drain in drains} == {"committed"}
    (step,) = {drain.step for drain in drains}
    assert step is not None
    drills.all_saved(job, step, range(world.size))
    served = {c.epoch for _, c in job.witness.commits[commits:] if c.phase == "done"}
    assert len(served) == 1, f"drains at once shared no commit: epochs {served}"
    staying = [node for node in job.nodes.values() if node not in leavers]
    smaller = job.world_of(staying, not_=world)
    assert smaller.began_s > world.ended_s
    job.goes_on(smaller, STEPS_BETWEEN)
    for node in leavers:
        if notice in (drills.sigterm, drills.terminate):
            assert gone(job, node) == DRAINED_STATUS
        else:
            job.kill_node(node)
    job.add(len(leavers))
    again = job.world_of(job.nodes.values(), not_=smaller)
    job.goes_on(again, STEPS_BETWEEN)
    return again


def operator(job: Job, node: Node) -> None:
    """``muster drain --wait``, to its end."""
    process = drills.by_hand(job, node, "--wait")
    said, _ = process.communicate(timeout=40)
    assert process.returncode == 0, said
    assert said.splitlines()[-1].startswith("released"), said


def operators(job: Job, node: Node) -> None:
    """``muster drain``, without waiting."""
    process = drills.by_hand(job, node)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0, said


@pytest.mark.parametrize("slots", [1, 2])
def test_drains_in_a_row_lose_no_step_and_repeat_none(
    run_job: RunJob, embedded: list[str], slots: int
) -> None:
    with draining_job(run_job, embedded, slots=slots, least=2, most=4) as job:
        job.add(3 if slots == 1 else 2)
        world = job.world_of(job.nodes.values())
        job.goes_on(world, STEPS_BETWEEN)
        world = (
            drain_and_replace(job, world, [drills.hosts_rank_0(job, world)], drills.terminate)
            if slots == 1
            else world
        )
        if slots == 1:
            last, second = sorted(job.nodes)[-1], sorted(job.nodes)[-2]
            job.add()
            world = job.world_of(job.nodes.values(), not_=world)
            pair = [job.nodes[last], job.nodes[second]]
            world = drain_and_replace(job, world, pair, drills.sigterm)
        else:
            job.add()
            world = job.world_of(job.nodes.values(), not_=world)
            world = drain_and_replace(job, world, [drills.hosts_rank_0(job, world)], operator)
        told = nothing_lost(job)
        assert told.steps > 4 * STEPS_BETWEEN
        entries = drills.history(job)
        assert {entry["details"]["outcome"] for entry in entries} == {"committed"}
