# SPDX-License-Identifier: Apache-2.0
"""Events of drains: notices, by the pod's end and by hand, and their cancellation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.drain.transactions import cancel
from rdzv.errors import StoreFull
from rdzv.store.memory.client import transact
from tests.simulation.nodes import KEYS

if TYPE_CHECKING:
    from tests.simulation.pods import Pod
    from tests.simulation.story import Story


def notice(story: Story) -> None:
    """Give one pod notice that it ends."""
    if pod := _stays(story):
        pod.terminate(story.random.choice((5.0, 10.0, 20.0)), "sigterm")
        story.later(story.random.uniform(1.0, 15.0), lambda: story.replace(pod))


def take_name_over(story: Story) -> None:
    """Give one pod notice, and let another one of its name come while it still saves."""
    pod = _stays(story)
    # Of two pods that wait for one name, either may get it.
    if pod is not None and pod.sidecar is not None and pod.sidecar.registrar.held is not None:
        pod.terminate(story.random.choice((10.0, 20.0, 30.0)), "sigterm")
        story.later(story.random.uniform(0.1, 3.0), lambda: story.take_over(pod))


def notice_and_cancel(story: Story) -> None:
    """Drain one pod by hand, and think better of it."""
    if pod := _stays(story):
        pod.terminate(20.0, "control")
        story.later(story.random.uniform(0.1, 5.0), lambda: _cancel(story, pod))
        story.later(story.random.uniform(5.0, 10.0), lambda: story.replace(pod))


def drain_patiently(story: Story) -> None:
    """Drain one pod by hand, with minutes to spare."""
    if pod := _stays(story):
        pod.terminate(story.random.choice((60.0, 120.0)), "control")
        story.later(story.random.uniform(5.0, 20.0), lambda: story.replace(pod))


def _stays(story: Story) -> Pod | None:
    """A pod with a sidecar that nobody has told to go, if the one that is drawn is such a pod."""
    pod = story.any()
    return None if pod is None or pod.terminating or pod.sidecar is None else pod


def _cancel(story: Story, pod: Pod) -> None:
    """Do as ``muster drain --cancel`` does, over a cable of its own that always works."""
    writes = cancel(KEYS, story.invariants.snapshot, pod.pod_uid)
    if isinstance(writes, str):
        story.say(pod, f"is not cancelled: {writes}")
        return
    try:
        transact(story.job.engine, *writes)
    except StoreFull:
        story.say(pod, "is not cancelled: the store takes no writes")
    else:
        story.say(pod, "its drain is cancelled")
