# SPDX-License-Identifier: Apache-2.0
"""Events of pods and of the torchruns in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.simulation.story import Story


def die(story: Story) -> None:
    """Lose one pod for good; one of the same name may come."""
    pod = story.any()
    if pod is None or len(story.job.present()) <= 1:
        return
    pod.die()
    story.later(story.random.uniform(0.5, 15.0), lambda: story.replace(pod))


def end_torchrun(story: Story) -> None:
    """Kill one training container; it is started again."""
    pod = story.any()
    if pod is not None and pod.torchrun is not None:
        pod.end_container()
        story.later(story.random.uniform(0.5, 4.0), pod.start_container)


def fail_workers(story: Story) -> None:
    """Let one pod's workers fail; its agent has restarts left."""
    pod = story.any()
    if pod is not None and pod.torchrun is not None:
        story.say(pod, "its workers are to fail")
        pod.torchrun.order("rejoin")


def close(story: Story) -> None:
    """Let one pod's workers fail for the last time: its agent wants the run closed."""
    pod = story.any()
    if pod is not None and pod.torchrun is not None:
        story.say(pod, "its workers are to fail for the last time")
        story.invariants.rounds.may_close = True
        pod.torchrun.order("fail")
