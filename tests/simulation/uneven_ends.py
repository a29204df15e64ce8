# SPDX-License-Identifier: Apache-2.0
"""What goes wrong while some ranks of a world have finished and others have not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher_shim.c10d.rounds.records import Round
from launcher_shim.pod.hold import FAREWELL_S
from tests.simulation.nodes import LEASE_TTL_S

if TYPE_CHECKING:
    from tests.simulation.pods import Pod
    from tests.simulation.story import Story


LATE_NAME = "h"


def fail_beside_the_finished(story: Story) -> None:
    """Once one stands in the exit barrier, lose another one of its world, in one way or another."""
    story.say(None, "somebody is to fail once another one has finished")

    def at_finish(current: Round) -> None:
        loop, director = story.job.loop, story.job.director
        loop.call_later(
            story.random.uniform(0.2, 4.0), _fail, story, current, context=director.context
        )

    story.invariants.rounds.at_finish = at_finish


LOOK_S = 0.5
ENDING_S = 3.0
"""Longer than it takes to see the upload begin, and a torchrun to see that its rank has ended."""

REPLACED_S = 20.0
"""For so long at most a replacement waits beside those that have finished, once the lease of the
one before it is over."""


def replace_beside_the_finished(story: Story) -> None:
    """Lose the only one that has not finished; a pod of another name does its part soon."""

    def lose(pod: Pod) -> None:
        pod.die()
        story.come(LATE_NAME)
        story.later(LEASE_TTL_S + REPLACED_S, check)

    def check() -> None:
        late = story.job.pods[LATE_NAME]
        if not late.finished and (late.torchrun is None or late.torchrun.round is None):
            story.invariants.break_(f"I11: {late.name} waits for torchruns that have finished")

    _one_uploads(story, story.random.uniform(20.0, 60.0), lose)


def end_amid_the_upload(story: Story) -> None:
    """End the only one that has not finished; its last upload just fits into its grace."""
    upload_s = story.random.uniform(10.0, 40.0)
    left_s = upload_s + ENDING_S + FAREWELL_S

    def end(pod: Pod) -> None:
        pod.terminate(left_s, "sigterm")

        def check() -> None:
            drain = story.invariants.snapshot.drains.get(pod.pod_uid)
            if not pod.finished or (drain is not None and drain.outcome == "expired"):
                story.invariants.break_(f"I10: {pod.name} is not left to end its last work")

        story.later(left_s, check)

    _one_uploads(story, upload_s, end)


def _one_uploads(story: Story, upload_s: float, act: Callable[[Pod], None]) -> None:
    """Let one rank upload after the last step; ``act`` on its pod once another has finished."""
    pod = story.any()
    if pod is None:
        return
    story.say(pod, f"has {upload_s:.1f} s of work left after the last step")
    story.job.uploads_s = {pod.name: upload_s}

    def at_finish(current: Round) -> None:
        story.job.loop.call_soon(look, context=story.job.director.context)

    def look() -> None:
        rank = pod.torchrun.rank if pod.torchrun is not None else None
        if rank is not None and rank.uploads:
            act(pod)
        elif not pod.gone:
            story.later(LOOK_S, look)

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
