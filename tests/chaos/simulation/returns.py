# SPDX-License-Identifier: Apache-2.0
"""Events in which somebody is away for about as long as it takes to be given up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher_shim.c10d.nodes import Round
from tests.chaos.simulation.launchers import end_torchrun
from tests.chaos.simulation.nodes import LEASE_TTL_S

if TYPE_CHECKING:
    from tests.chaos.simulation.story import Story

GIVEN_UP_S = (LEASE_TTL_S + 1.0, LEASE_TTL_S + 6.0)
"""Within this time a sidecar that is away is taken for gone: its lease, and a confirmation."""


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
