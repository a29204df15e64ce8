# SPDX-License-Identifier: Apache-2.0
"""Events of the store, of the network before it, and of sidecars that stop for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.network import Weather
from tests.simulation.nodes import LEASE_TTL_S

if TYPE_CHECKING:
    from tests.simulation.pods import Pod
    from tests.simulation.story import Story
    from tests.support.clocks.virtual import Process

BAD = (
    Weather(0.05, refused=0.1),
    Weather(0.3, lost=0.05, unanswered=0.05),
    Weather(0.1, late=0.1, unanswered=0.1),
    Weather(1.0),
)


def cut_one(story: Story) -> None:
    """Cut one pod from the store."""
    _cut_one(story, story.outage_s)


def cut_one_for_long(story: Story) -> None:
    """Cut one pod off for longer than anybody waits for its return."""
    _cut_one(story, lambda: story.random.uniform(14.0, 40.0))


def cut_all(story: Story) -> None:
    """Take the store away from everybody."""
    if not story.job.whole:
        return
    story.say(None, "the store is out of reach for all")
    story.job.cut_all(refuses=story.random.random() < 0.3)
    story.later(story.outage_s(), lambda: _mend_all(story))


def tear(story: Story) -> None:
    """Break one connection, which is made again at once."""
    pod = story.any()
    if pod is not None and pod.link is not None:
        story.say(pod, "loses its connection")
        pod.link.tear()


def stall(story: Story) -> None:
    """Hold one watch back."""
    pod = story.any()
    if pod is not None and pod.link is not None:
        seconds = story.random.uniform(0.5, 8.0)
        story.say(pod, f"its watch stalls for {seconds:.3f} s")
        pod.link.stall(seconds)


def compact(story: Story) -> None:
    """Forget the store's history up to now."""
    engine = story.job.engine
    if engine.compact_revision < engine.revision:
        story.say(None, f"the store is compacted at {engine.revision}")
        engine.compact(engine.revision)


def freeze(story: Story) -> None:
    """Stop one sidecar, and let it go on later as if nothing had been."""
    pod = story.any()
    if pod is None or pod.sidecar is None or pod.sidecar.process.frozen:
        return
    process = pod.sidecar.process
    process.frozen = True
    story.say(pod, "its sidecar freezes")
    story.later(story.outage_s(), lambda: _thaw(story, pod, process))


def crash(story: Story) -> None:
    """Kill one sidecar; another one starts in its place."""
    pod = story.any()
    if pod is not None and pod.sidecar is not None:
        pod.crash()
        down_s = story.random.choice((0.2, 1.0, LEASE_TTL_S + 2))
        story.later(down_s, lambda: story.restart(pod))


def crash_briefly(story: Story) -> None:
    """Kill one sidecar, which is back before anybody could miss it."""
    pod = story.any()
    if pod is not None:
        start_again(story, pod)


def start_again(story: Story, pod: Pod) -> None:
    """Kill the sidecar of a pod, and start another one in its place at once."""
    if pod.sidecar is not None:
        pod.crash()
        story.later(story.random.uniform(0.1, 1.0), lambda: story.restart(pod))


def crash_unregistered(story: Story) -> None:
    """Kill one sidecar; the next one reads the store and cannot register for a while."""
    pod = story.any()
    if pod is not None and pod.sidecar is not None and pod.link is not None:
        seconds = story.random.uniform(3.0, 20.0)
        pod.crash()
        story.say(pod, f"is granted no lease for {seconds:.3f} s")
        story.later(story.random.uniform(0.1, 1.0), lambda: _restart_refused(story, pod, seconds))


def bad_weather(story: Story) -> None:
    """Let calls be lost, refused, late, for everybody."""
    weather = story.random.choice(BAD)
    story.say(None, f"weather: {weather}")
    story.job.set_weather(weather)
    story.later(story.random.uniform(1.0, 15.0), lambda: story.job.set_weather(Weather()))


def lag(story: Story) -> None:
    """Let one watch be late with everything, for a while."""
    pod = story.any()
    if pod is None or pod.link is None or pod.link.lag_s:
        return
    link = pod.link
    link.lag_s = story.random.uniform(0.3, 3.0)
    story.say(pod, f"its watch is {link.lag_s:.3f} s late")
    story.later(story.random.uniform(2.0, 20.0), lambda: _catch_up(story, pod))


def tell_early(story: Story) -> None:
    """Let a watch be told of revisions before it is shown their events, for a while."""
    pod = story.any()
    if pod is not None and pod.link is not None:
        story.say(pod, "its watch tells of revisions too early")
        pod.link.tell_early(story.random.uniform(2.0, 15.0))


def _cut_one(story: Story, duration_s: Callable[[], float]) -> None:
    pod = story.any()
    if pod is not None and pod.link is not None and pod.link.whole:
        cut(story, pod)
        story.later(duration_s(), lambda: mend(story, pod))


def cut(story: Story, pod: Pod) -> None:
    """Cut a pod off, in one way or the other."""
    refuses = story.random.random() < 0.3
    story.say(pod, f"is cut off ({'refused' if refuses else 'black hole'})")
    if pod.link is not None:
        pod.link.cut(refuses=refuses)


def mend(story: Story, pod: Pod) -> None:
    """End the cut of a pod, if it is cut off still."""
    if pod.link is not None and not pod.link.whole and story.job.whole:
        story.say(pod, "reaches the store again")
        pod.link.mend()


def _mend_all(story: Story) -> None:
    story.say(None, "the store is back for all")
    story.job.mend_all()


def _thaw(story: Story, pod: Pod, process: Process) -> None:
    if pod.sidecar is not None and pod.sidecar.process is process:
        story.say(pod, "its sidecar goes on")
        story.job.loop.thaw(process)


def _catch_up(story: Story, pod: Pod) -> None:
    if pod.link is not None and pod.link.lag_s:
        story.say(pod, "its watch is late no more")
        pod.link.lag_s = 0.0


def _restart_refused(story: Story, pod: Pod, seconds: float) -> None:
    story.restart(pod)
    if pod.link is not None:
        pod.link.refuse_leases(seconds)
