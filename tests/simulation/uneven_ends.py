# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while some ranks of a world have finished and others have not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher_shim.c10d.rounds.records import Round

if TYPE_CHECKING:
    from tests.simulation.story import Story


def fail_beside_the_finished(story: Story) -> None:
    """Once one stands in the exit barrier, lose another one of its world, in one way or another."""
    story.say(None, "somebody is to fail once another one has finished")

    def at_finish(current: Round) -> None:
        loop, director = story.job.loop, story.job.director
        loop.call_later(
            story.random.uniform(0.2, 4.0), _fail, story, current, context=director.context
        )

    story.invariants.rounds.at_finish = at_finish


def _fail(story: Story, current: Round) -> None:
    busy = [
        pod
        for seat in current.frozen
        if (pod := story.job.pod(seat.member)).torchrun is not None
        and pod.torchrun.round == current.number
        and pod.torchrun.rank is not None
        and not pod.torchrun.rank.finished
    ]
    if not busy:
        return
    pod = story.random.choice(busy)
    assert pod.torchrun is not None
    how = story.random.choice(("rejoin", "fail", "kill"))
    story.say(pod, f"fails beside one that has finished: {how}")
    if how == "kill":
        pod.end_container()
        story.later(story.random.uniform(0.5, 4.0), pod.start_container)
    else:
        pod.torchrun.order(how)
