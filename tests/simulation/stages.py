# SPDX-License-Identifier: Apache-2.0
"""Containers that are started again while the others may be a stage ahead of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.pods import Pod
    from tests.simulation.story import Story

WITHIN_S = 40.0
"""So long the stages of most stories last."""


def start_container_again(story: Story) -> None:
    """Kill one training container, some time or other; its command begins at its first stage."""
    story.say(None, "a container is to be started again")
    story.later(story.random.uniform(0.0, WITHIN_S), lambda: _end_one(story))


def _end_one(story: Story) -> None:
    running = [pod for pod in story.job.present() if pod.container and not pod.finished]
    pods = [pod for pod in running if not _may_have_finished(story, pod)]
    if not pods:
        return
    pod = story.random.choice(pods)
    story.say(pod, f"its container ends in stage {pod.stage}")
    pod.end_container()
    story.later(story.random.uniform(0.5, 6.0), pod.start_container)


def _may_have_finished(story: Story, pod: Pod) -> bool:
    """Whether somebody may be through with the stage in which ``pod`` trains.

    Who is lost then and comes back may find too few to go on with, as without Muster.
    """
    rank = pod.torchrun.rank if pod.torchrun is not None else None
    last = story.job.last_step
    return rank is not None and last is not None and rank.world.began.get(pod.name, 0) >= last
