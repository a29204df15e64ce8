# SPDX-License-Identifier: Apache-2.0
"""Worlds that form again although nobody is lost, with torch's own handlers: newcomers that are
gathered, sizes that are allowed, a pause."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from tests.support.clocks.virtual import now
from tests.support.sidecars.rendezvous import Job, job

pytestmark = pytest.mark.virtual

GATHERING = RoundPolicy(2, 10, first_call_s=1.0, confirm_s=0.5, hold_s=0.2, gather_s=60.0)
HOUR_S = 3600.0


def worlds(one: Job) -> list[int]:
    """The sizes of the worlds that there were, in order; each had ``a`` in it."""
    return [world.size for world in one.torchruns["a"].worlds]


@pytest.mark.parametrize(
    ("gather_s", "sizes"),
    [(60.0, [2, 6, 10]), (0.0, [*range(2, 11)])],
    ids=["gathered", "each at once"],
)
async def test_eight_that_come_within_two_minutes_make_two_worlds_or_one_each(
    gather_s: float, sizes: list[int]
) -> None:
    async with job(replace(GATHERING, gather_s=gather_s), world="ab") as one:
        for name in "cdefghij":
            await one.node(name)
            await asyncio.sleep(120 / 7)
        await one.world("abcdefghij")
        assert worlds(one) == sizes
        assert [t.failure for t in one.everyone] == [None] * 10


async def test_a_loss_forms_the_world_again_at_once_and_takes_in_who_waits() -> None:
    async with job(replace(GATHERING, gather_s=HOUR_S), world="abc") as one:
        await one.node("d")
        await one.until(lambda: "d" in one.sidecars["a"].rendezvous.snapshot().nodes)
        began_s = now()
        one.torchruns["b"].kill()
        await one.world("acd")
        assert now() - began_s < GATHERING.gather_s
        assert worlds(one) == [3, 3]


async def test_a_third_node_stands_by_until_a_fourth_makes_an_allowed_size() -> None:
    policy = replace(GATHERING, max_nodes=4, sizes=(2, 4), gather_s=0.0)
    async with job(policy, world="ab") as one:
        await one.node("c")
        await one.passed(HOUR_S)
        assert (worlds(one), one.torchruns["c"].worlds) == ([2], [])
        await one.node("d")
        await one.world("abcd")
        assert worlds(one) == [2, 4]
        assert [t.failure for t in one.everyone] == [None] * 4


@pytest.mark.parametrize(
    ("most", "sizes", "stay"), [(2, (), "ab"), (4, (1, 3), "abc"), (3, (4, 9), "abcd")]
)
async def test_a_world_that_has_become_too_large_gives_the_youngest_up(
    most: int, sizes: tuple[int, ...], stay: str
) -> None:
    """Sizes that nobody can have leave it as it is."""
    policy = replace(GATHERING, max_nodes=4, gather_s=0.0)
    async with job(policy, world="abcd") as one:
        one.form_by(replace(policy, max_nodes=most, sizes=sizes))
        await one.tell()
        await one.world(stay)
        await one.passed(60)
        assert worlds(one) == ([4] if stay == "abcd" else [4, len(stay)])
        assert [t.failure for t in one.everyone] == [None] * 4
        one.form_by(policy)
        await one.tell()
        await one.world("abcd")


async def test_a_pause_of_an_hour_ends_the_world_and_no_torchrun() -> None:
    policy = replace(GATHERING, max_nodes=3, gather_s=0.0)
    async with job(policy, world="abc") as one:
        one.form_by(replace(policy, paused=True))
        await one.tell()
        await one.until(lambda: not one.sidecars["a"].rendezvous.round.complete)
        await one.passed(HOUR_S)
        assert worlds(one) == [3]
        assert one.sidecars["a"].rendezvous.reason == "round 1: 3 nodes ask, and the job is paused"
        one.form_by(policy)
        await one.tell()
        await one.until(lambda: all(len(t.worlds) == 2 for t in one.everyone))
        assert await one.world("abc") == 1
        assert [t.failure for t in one.everyone] == [None] * 3
