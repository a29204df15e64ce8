# SPDX-License-Identifier: Apache-2.0
"""Events of a second run id in the same job, in a container of its own time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher_shim.c10d.rounds.records import Round
from rdzv.store import Put
from rdzv.store.memory.client import transact
from tests.simulation.nodes import KEYS
from tests.simulation.torchrun import RUN

if TYPE_CHECKING:
    from tests.simulation.pods import Pod
    from tests.simulation.story import Story

FAILED = "prepare"
FRESH = "evaluate"


def failed_run(story: Story) -> None:
    """Have the store know of a run of this job that was closed by failure."""
    if story.invariants.snapshot.job is None:
        story.later(0.5, lambda: failed_run(story))
        return
    generation = story.invariants.snapshot.job.generation
    story.say(None, f"the run {FAILED} has failed")
    key = KEYS.in_generation(generation).run(FAILED).round
    transact(story.job.engine, [], [Put(key, Round(0, True, "failure").to_json())])


def other_run(story: Story) -> None:
    """Let one container start anew, and begin with another run than the others are in."""
    pod = story.any()
    if pod is None or pod.torchrun is None or pod.run != RUN:
        return
    pod.end_container()
    pod.run = story.random.choice((FAILED, FAILED, FRESH))
    story.later(story.random.uniform(0.5, 2.0), pod.start_container)
    story.later(story.random.uniform(3.0, 20.0), lambda: _go_on(story, pod))


def _go_on(story: Story, pod: Pod) -> None:
    """Let it come to the run that the others are in."""
    if not pod.gone:
        story.say(pod, f"is through with the run {pod.run}")
        pod.run = RUN
        pod.end_container()
        story.later(1.0, pod.start_container)
