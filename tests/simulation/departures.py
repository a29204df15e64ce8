# SPDX-License-Identifier: Apache-2.0
"""Events of drains: notices, by the pod's end and by hand, and their cancellation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from launcher_shim.pod.hold import reserve_s
from rdzv.drain.transactions import cancel, change, first_write
from rdzv.errors import StoreFull
from rdzv.records.drain import CONTROLLER, Drain
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


def preempt(story: Story) -> None:
    """End one pod to make room; its replacement comes once it is gone, as the controller tells."""
    if pod := _stays(story):
        pod.terminate(story.random.choice((10.0, 20.0, 60.0)), "sigterm")
        story.later(story.random.uniform(0.0, 1.0), lambda: _mark(story, pod))
        story.later(story.random.uniform(1.0, 15.0), lambda: story.replace(pod))


def end_all(story: Story) -> None:
    """End all pods, as who deletes their Deployment, and makes another one soon after."""
    pods = [pod for pod in story.job.present() if not pod.terminating and pod.sidecar is not None]
    left_s = story.random.choice((10.0, 20.0, 60.0))
    for pod in pods:
        pod.terminate(left_s, "sigterm")
        story.later(story.random.uniform(1.0, 15.0), partial(story.replace, pod))


def cordon(story: Story) -> None:
    """Cordon one pod's node, and put it back: before the save, amid it, or after the grant."""
    if pod := _asked_by_controller(story, story.random.choice((20.0, 600.0))):
        story.later(story.random.uniform(0.1, 8.0), lambda: _cancel(story, pod))


def cordon_for_good(story: Story) -> None:
    """Cordon one pod's node, of which it is never evicted."""
    _asked_by_controller(story, story.random.choice((8.0, 20.0)))


def _asked_by_controller(story: Story, left_s: float) -> Pod | None:
    """Drain a pod as the controller does."""
    pod, snapshot = _stays(story), story.invariants.snapshot
    if pod is None or pod.pod_uid in snapshot.drains or pod.name not in snapshot.members:
        return None
    reason = "its node is cordoned"
    drain = Drain(pod.pod_uid, pod.name, reason, CONTROLLER, left_s, reserve_s(left_s))
    story.say(pod, reason)
    transact(story.job.engine, *first_write(KEYS, snapshot, drain))
    return pod


def _mark(story: Story, pod: Pod) -> None:
    """Do as the controller does that sees a preemption; in vain before the drain is stored."""
    snapshot = story.invariants.snapshot
    drain = snapshot.drains.get(pod.pod_uid)
    if drain is not None and not drain.outcome:
        story.say(pod, "it makes room for another pod")
        transact(story.job.engine, *change(KEYS, snapshot, replace(drain, preempted=True)))


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
