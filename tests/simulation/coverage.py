# SPDX-License-Identifier: Apache-2.0
"""What has happened in a story: many of them must reach what they are told for."""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation.timeline import Timeline

SIGNS: Mapping[str, str] = {
    "a world formed again": "sees a waiter",
    "a torchrun waited as a spare": "waits as a spare",
    "a spare was promoted": "is a spare no more",
    "was given fillers": "in a world of nowhere",
    "a drain committed": "SIGTERM passes (committed)",
    "a drain expired": "SIGTERM passes (expired)",
    "a drain ended without a commit": "SIGTERM passes (released)",
    "a drain was cancelled": "the drain is cancelled",
    "a periodic checkpoint counted": "the periodic checkpoint of step",
    "a save failed": "could not save",
    "all workers finished": "has finished",
    "a torchrun gave up": "torchrun gives up",
    "a torchrun passed over a stage": "passes over",
    "a launcher crashed": "its torchrun crashes",
    "a launcher never came": "its torchrun cannot be started",
    "a sidecar was fenced": "is fenced",
    "a write landed late": "its txn lands",
    "the job began its next life": "begins its next life",
}
"""By what line of the timeline each is known."""


def signs(timeline: Timeline) -> frozenset[str]:
    """Which of ``SIGNS`` the timeline shows."""
    found: set[str] = set()
    missing = dict(SIGNS)
    for _, _, what in timeline.lines:
        for name, sign in tuple(missing.items()):
            if sign in what:
                found.add(name)
                del missing[name]
    return frozenset(found)
