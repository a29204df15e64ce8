# SPDX-License-Identifier: Apache-2.0
"""Drains one after another in one job: what has piled up by then makes none of them different.

``tests/e2e/test_drains.py`` has a few in a row under real torchruns.
"""

from __future__ import annotations

from string import ascii_letters

import pytest

from agent.drain.notice import Source
from tests.support.sidecars.drains import Job, job
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual

DRAINS = 30
SOURCES: tuple[Source, ...] = ("prestop", "sigterm", "hold")


async def next_world(one: Job, names: str, loop: Loop) -> None:
    """Let ``names`` train from the step that is saved: none is lost, none trained twice."""
    await one.form(names, loop)
    await one.training()
    _, saved = one.done[-1]
    for name in names:
        for local_rank in range(loop.ranks):
            assert one.pods[name].steps("begin", None, local_rank) == [saved]
            assert one.pods[name].steps("step", None, local_rank)[0] == saved + 1


@pytest.mark.parametrize("ranks", [1, 2])
async def test_thirty_drains_in_a_row_each_with_a_pod_in_its_place(ranks: int) -> None:
    loop = Loop(ranks=ranks)
    later = iter(ascii_letters[3:])
    async with job("abc", trains="abc", loop=loop) as one:
        names, drained = "abc", 0
        while drained < DRAINS:
            # Every fifth time two at once; rank 0 goes, or the last.
            count = 2 if drained % 5 == 4 else 1
            leavers = names[:count] if drained % 3 != 1 else names[-count:]
            source = SOURCES[drained % 3]
            clients = [one.pods[name].notice(source, 120) for name in leavers]
            for client in clients:
                assert await client.release() == "committed"
            drained += count
            for name in leavers:
                await one.pods[name].kill()
            names = "".join(name for name in names if name not in leavers)
            await next_world(one, names, loop)
            come = "".join(next(later) for _ in leavers)
            for name in come:
                await one.add(name)
                await one.ask(name)
            await one.until(lambda: one.commit.admitted)
            names += come
            await next_world(one, names, loop)
        assert len(one.history()) == drained
        # One agreement for each that went, or pair, and one for those in its place.
        assert one.commit.epoch == len(one.ended_rounds) == one.number
