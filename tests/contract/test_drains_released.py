# SPDX-License-Identifier: Apache-2.0
"""Drains of pods with several ranks, in a later life of the job, and what a sidecar logs of one.

``tests/world/test_drains.py`` has the others.
"""

from __future__ import annotations

import re

import pytest

from rdzv.store.memory.client import MemoryStore
from tests.support.sidecars.drains import Job, job
from tests.support.sidecars.jobs import KEYS, begin_next_life
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual


def committed_step(one: Job) -> int:
    """The one step that has been committed, and that every rank has saved last."""
    ((_, step),) = one.done
    return step


@pytest.mark.parametrize("seed", range(3))
async def test_i3_two_processes_in_each_of_two_pods_save_the_same_step(seed: int) -> None:
    async with job("ab") as one:
        one.number += seed
        await one.form("ab", a=Loop(step_s=0.004, ranks=2), b=Loop(step_s=0.03, ranks=2))
        await one.training(2 + seed)
        await one.pods["b"].notice("sigterm", 120).release()
        step = committed_step(one)
        for name in "ab":
            for local_rank in (0, 1):
                assert one.pods[name].steps("save", None, local_rank) == [step]


async def test_a_drain_goes_on_in_the_jobs_next_life() -> None:
    async with job("ab", least=2, trains="ab") as one:
        client = one.pods["b"].notice("sigterm", 60)
        await one.until(lambda: one.pods["b"].drain is not None)
        assert one.snapshot.job is not None
        await begin_next_life(MemoryStore(one.engine), KEYS, one.snapshot.job)
        await one.until(lambda: one.snapshot.job is not None and one.snapshot.job.generation == 2)
        await one.until(lambda: one.pods["b"].drain is not None)
        drain = one.pods["b"].drain
        assert drain is not None
        assert drain.seconds_left is not None
        assert drain.seconds_left < 60
        # Nothing has been trained in this life.
        assert await client.release() == "uncommitted"


async def test_a_sidecar_says_what_an_operator_wants_to_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        async with job("a", below_min="commit") as one:
            await one.form("a")
            await one.training()
            await one.pods["a"].notice("sigterm", 20.02, "the node is drained").release()
            step = committed_step(one)
    said = [
        r.getMessage() for r in caplog.records if r.name.startswith(("agent.", "rdzv.reconcile"))
    ]
    told = r"draining, this pod has to go within (1[5-9]|20)\.\d s \(sigterm\): the node is drained"
    assert re.fullmatch(told, said[0])
    assert said[1:5] == [
        "the gate is hold: holding the ranks: a leaves",
        f"votes in epoch 1: step {step}",
        f"the gate is commit: all save step {step}: a leaves",
        f"all ranks saved step {step}",
    ]
    # Who holds SIGTERM is told first.
    rest = [sentence for sentence in said[5:] if not sentence.startswith("the gate is done: ")]
    assert rest == [f"a may go: all ranks saved step {step}"]
