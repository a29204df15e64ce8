# SPDX-License-Identifier: Apache-2.0
"""Events of Jobs of the same name that were deleted, and of pods of theirs that come late."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.story import Story

FORMER_UIDS = ("uid-before-last", "uid-last")


def former_lives(story: Story) -> None:
    """Let one or two Jobs of this name have been there, and be deleted."""
    first = story.random.choice((0, 1))
    for number, uid in enumerate(FORMER_UIDS[first:]):
        pod = story.job.stray(f"former-{number}", uid)
        if story.plot.trains:
            story.later(1.0, pod.start_container)
        # The next one may come while the pod of the one before still ends.
        story.later(story.random.uniform(1.5, 3.0), pod.die)


def late_pod(story: Story) -> None:
    """Let a pod of a deleted Job come, whose image has been pulled only now, and be deleted."""
    known = [pod.shape.job_uid for pod in story.job.strays if pod.name.startswith("former")]
    uid = story.random.choice(known or FORMER_UIDS)
    pod = story.job.stray(f"late-{len(story.job.strays)}", uid)
    story.say(pod, "comes late: its Job is deleted")
    if story.plot.trains:
        story.later(story.random.uniform(0.0, 2.0), pod.start_container)
    story.later(story.random.uniform(1.0, 15.0), pod.die)
