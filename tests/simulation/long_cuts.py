# SPDX-License-Identifier: Apache-2.0
"""Events of pods that are cut off from the store for minutes: all, some, or a world as a whole."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.outages import cut, mend

if TYPE_CHECKING:
    from tests.simulation.pods import Pod
    from tests.simulation.story import Story

CUT_S = (30.0, 150.0, 600.0)
"""The longest cuts, in seconds; one of them is drawn for each."""
APART_S = 8.0
"""The pods that were cut off together come back within so long."""


def cut_all_for_long(story: Story) -> None:
    """Take the store away from everybody."""
    if story.job.whole:
        story.say(None, "the store is out of reach for all, for long")
        story.job.cut_all(refuses=story.random.random() < 0.3)
        story.later(_cut_s(story), lambda: _mend_all(story))


def cut_world_for_long(story: Story) -> None:
    """Cut all of the present world off; pods that stand by, or come meanwhile, have the store."""
    seats = story.invariants.rounds.round.frozen
    world = {seat.member for seat in seats}
    _cut(story, [pod for pod in story.job.present() if pod.name in world])


def cut_some_for_long(story: Story) -> None:
    """Cut some pods off, of the world or not."""
    present = story.job.present()
    some = story.random.randint(1, max(1, len(present) - 1))
    _cut(story, story.random.sample(present, min(some, len(present))))


def _cut(story: Story, pods: Collection[Pod]) -> None:
    cut_s = _cut_s(story)
    for pod in pods:
        if pod.link is not None and pod.link.whole:
            cut(story, pod)
            # Its sidecar may have been started again by then; as the node is cut off, so is that.
            pod.cut_off = True
            back_s = cut_s + story.random.uniform(0.0, APART_S)
            story.later(back_s, partial(_mend, story, pod))


def _mend(story: Story, pod: Pod) -> None:
    pod.cut_off = False
    mend(story, pod)


def _cut_s(story: Story) -> float:
    return story.random.uniform(20.0, story.random.choice(CUT_S))


def _mend_all(story: Story) -> None:
    story.say(None, "the store is back for all")
    story.job.mend_all()
