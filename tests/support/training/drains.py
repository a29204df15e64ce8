# SPDX-License-Identifier: Apache-2.0
"""What drains of real jobs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from tests.support.training import drain_job as drills
from tests.support.training.drain_job import (
    DRAINED_STATUS,
    drain_of,
    gone,
    nothing_lost,
)
from tests.support.training.job import Job, Node
from tests.support.training.step_log import World

STEPS_BETWEEN = 10


def drain_and_replace(
    job: Job,
    world: World,
    leavers: Sequence[Node],
    notice: Callable[[Job, Node], object],
    *,
    replace: int | None = None,
) -> World:
    """Tell ``leavers`` to go, all at once; others come in their place; the next world steps."""
    commits = len(job.witness.commits)
    # Several are told before the save for the first of them is over.
    with drills.saves_held(job) if len(leavers) > 1 else nullcontext():
        for node in leavers:
            notice(job, node)
        job.until(
            lambda: all(drain_of(job, node) for node in leavers), 120, "the drains are on record"
        )
    drains = [drills.released_soon(job, node) for node in leavers]
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
    coming = len(leavers) if replace is None else replace
    if not coming:
        return smaller
    job.add(coming)
    again = job.world_of(job.nodes.values(), not_=smaller)
    job.goes_on(again, STEPS_BETWEEN)
    return again


def operator(job: Job, node: Node) -> None:
    """``muster drain --wait``, to its end."""
    process = drills.by_hand(job, node, "--wait")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert said.splitlines()[-1].startswith("released"), said


def a_row_of_drains(job: Job, drains: int) -> None:
    """Drain one node after another, by each way in turn; every fifth time two at once."""
    world = job.world_of(job.nodes.values())
    job.goes_on(world, STEPS_BETWEEN)
    for turn in range(drains):
        notice = (drills.terminate, operator, drills.sigterm)[turn % 3]
        leavers = [drills.hosts_rank_0(job, world)]
        if turn % 3 == 1:
            leavers = [job.nodes[max(job.nodes)]]
        if turn % 5 == 4:
            job.add()
            world = job.world_of(job.nodes.values(), not_=world)
            job.goes_on(world, STEPS_BETWEEN)
            notice = drills.sigterm  # at once: commands take seconds to start on a busy machine
            leavers = [job.nodes[name] for name in sorted(job.nodes)[:2]]
        many = len(leavers) > 1
        world = drain_and_replace(job, world, leavers, notice, replace=1 if many else None)
    told = nothing_lost(job)
    assert told.steps > 2 * STEPS_BETWEEN * drains
    outcomes = [entry["details"]["outcome"] for entry in drills.history(job)]
    assert set(outcomes) == {"committed"}
    assert len(outcomes) >= drains
