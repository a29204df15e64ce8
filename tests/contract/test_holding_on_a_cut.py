# SPDX-License-Identifier: Apache-2.0
"""``--on-cut=hold`` with whole sidecars: ranks wait once their pod has had no lease for 60 s."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.drain.gate import ON_CUT_S
from tests.support.sidecars.drains import Job, Pod, job

pytestmark = pytest.mark.virtual

LONG_S = 600.0


def steps(one: Job) -> int:
    """The steps that ranks have made so far."""
    return sum(what == "step" for rank in one.ranks_of[one.number].values() for what, _ in rank.log)


async def cut(one: Job, seconds: float) -> None:
    for pod in one.pods.values():
        pod.cable.cut()
    await asyncio.sleep(seconds)


async def goes_on(one: Job, pod: Pod) -> None:
    before = steps(one)
    for each in one.pods.values():
        each.cable.mend()
    await pod.soon(lambda: pod.shown() == "idle" and steps(one) > before + 3)


async def test_i5_ranks_wait_for_a_lease_and_train_on_with_it() -> None:
    async with job("ab", trains="ab", on_cut="hold") as one:
        a = one.pods["a"]
        await cut(one, ON_CUT_S)
        assert a.shown() == "idle", "its lease has not been gone for that long"
        await asyncio.sleep(one.lease_ttl_s + 5.0)
        assert a.shown() == "hold"
        waited = steps(one)
        await asyncio.sleep(LONG_S)
        assert (a.shown(), steps(one)) == ("hold", waited)
        await goes_on(one, a)


async def test_i1_a_sidecar_that_starts_in_a_cut_holds_its_ranks_as_well() -> None:
    async with job("ab", trains="ab", on_cut="hold") as one:
        a = one.pods["a"]
        await cut(one, 5.0)
        await a.kill()
        await a.start(cut=True)
        await asyncio.sleep(ON_CUT_S + 5.0)
        assert a.shown() == "hold"
        await a.kill()
        await a.start(cut=True)
        await asyncio.sleep(5.0)
        assert a.shown() == "hold", "the one before it held them"
        await goes_on(one, a)


async def test_i5_without_it_ranks_train_on_for_as_long_as_the_store_is_away() -> None:
    async with job("ab", trains="ab") as one:
        await cut(one, LONG_S)
        before = steps(one)
        await asyncio.sleep(5.0)
        assert steps(one) > before
        await goes_on(one, one.pods["a"])
