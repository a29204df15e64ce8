# SPDX-License-Identifier: Apache-2.0
"""Events in which a lease is revoked by hand, at a bad moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.pods import Pod
    from tests.simulation.story import Story


def evict_and_crash(story: Story) -> None:
    """Revoke one lease; kill the sidecar while it registers anew, which lands late."""
    pod = story.any()
    if pod is None or pod.link is None or not _evict(story, pod):
        return
    pod.link.dawdle(2.0)
    story.later(story.random.uniform(0.1, 1.9), lambda: _crash_for_a_moment(story, pod))


def evict_and_notice(story: Story) -> None:
    """Revoke one lease behind a watch that stalls, and give that pod notice."""
    pod = story.any()
    if pod is None or pod.terminating or not _evict(story, pod, unseen=True):
        return
    pod.terminate(story.random.choice((10.0, 20.0)), "sigterm")
    story.later(story.random.uniform(1.0, 15.0), lambda: story.replace(pod))


def evict_and_end_torchrun(story: Story) -> None:
    """Revoke one lease behind a watch that stalls, and kill that pod's training container."""
    pod = story.any()
    if pod is not None and pod.torchrun is not None and _evict(story, pod, unseen=True):
        pod.end_container()
        story.later(story.random.uniform(0.5, 4.0), pod.start_container)


def _evict(story: Story, pod: Pod, *, unseen: bool = False) -> bool:
    story.job.engine.expire_leases()
    lease_id = pod.sidecar.registrar.lease_id if pod.sidecar else None
    if lease_id is None or lease_id not in story.job.engine.leases or pod.link is None:
        return False
    if unseen:
        pod.link.stall(story.random.uniform(1.0, 3.0))
    story.say(pod, f"its lease is revoked by hand{', unseen by it' if unseen else ''}")
    story.job.engine.revoke(lease_id)
    return True


def _crash_for_a_moment(story: Story, pod: Pod) -> None:
    if pod.sidecar is not None:
        pod.crash()
        story.later(0.2, lambda: story.restart(pod))
