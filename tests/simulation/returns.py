# SPDX-License-Identifier: Apache-2.0
"""Events in which somebody is away for about as long as it takes to be given up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher_shim.c10d.rounds.records import Round
from tests.simulation.launchers import end_torchrun
from tests.simulation.nodes import LEASE_TTL_S
from tests.simulation.outages import cut, mend

if TYPE_CHECKING:
    from tests.simulation.story import Story

GIVEN_UP_S = (LEASE_TTL_S + 1.0, LEASE_TTL_S + 6.0)
"""Within this time a sidecar that is away is taken for gone: its lease, and a confirmation."""


def drain_behind_a_cut(story: Story) -> None:
    """Cut one pod off and drain another one of its world, and perhaps lose that one, too."""
    frozen = {seat.member for seat in story.invariants.rounds.round.frozen}
    world = [pod for pod in story.job.present() if not pod.terminating and pod.name in frozen]
    if len(world) < 2:
        return
    away, leaver = story.random.sample(world, 2)
    if away.link is None or not away.link.whole or leaver.sidecar is None:
        return
    cut(story, away)
    leaver.terminate(story.random.choice((60.0, 120.0)), "control")

    def lose() -> None:
        if leaver.link is not None and leaver.link.whole:
            story.say(leaver, "is cut off as well")
            leaver.link.cut(refuses=False)

    if story.random.random() < 0.5:
        story.later(story.random.uniform(0.05, 1.0), lose)
    story.later(story.random.uniform(*GIVEN_UP_S), lambda: mend(story, away))
    story.later(story.random.uniform(20.0, 40.0), lambda: mend(story, leaver))
    story.later(story.random.uniform(20.0, 40.0), lambda: story.replace(leaver))


def lose_first_rank(story: Story) -> None:
    """Let a world form, and its first rank's sidecar be away before it has said where to meet."""

    def crash(name: str) -> None:
        pod = story.job.pods[name]
        if pod.sidecar is not None:
            pod.crash()
            story.later(story.random.uniform(*GIVEN_UP_S), lambda: story.restart(pod))

    def frozen(new: Round) -> None:
        context = story.job.director.context
        story.job.loop.call_soon(crash, new.frozen[0].member, context=context)

    story.invariants.rounds.at_freeze = frozen
    end_torchrun(story)
