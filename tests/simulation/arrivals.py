# SPDX-License-Identifier: Apache-2.0
"""Events of a cluster that grows: nodes come one after the other, beside some that are ill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.plot import LATER_PODS

if TYPE_CHECKING:
    from tests.simulation.story import Story

NEXT_S = (20.0, 50.0)
"""Between two nodes that an autoscaler adds."""


def break_disk(story: Story) -> None:
    """Let the run directory of a pod take no writes any more: its sidecar cannot vote."""
    pod = story.any()
    if pod is not None and not any(one.run_dir.broken for one in story.job.present()):
        story.say(pod, "its run directory takes no writes")
        pod.run_dir.broken = True


def come_later(story: Story) -> None:
    """Let another pod come."""
    name = f"n{len(story.job.pods)}"
    if name not in story.job.pods and len(story.job.pods) < LATER_PODS:
        story.come(name)


def keep_coming(story: Story) -> None:
    """Let one pod after the other come."""
    story.say(None, f"{LATER_PODS} more pods come, one after the other")
    after_s = 0.0
    for number in range(LATER_PODS):
        after_s += story.random.uniform(*NEXT_S)
        story.later(after_s, lambda name=f"n{number}": story.come(name))  # type: ignore[misc]
