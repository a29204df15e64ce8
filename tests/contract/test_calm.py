# SPDX-License-Identifier: Apache-2.0
"""What the contract has for busy machines: it excuses a process that stood still, and no other."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from tests.support.clocks import calm
from tests.support.clocks.awake_clock import awake_clock
from tests.support.clocks.calm import ATTEMPTS, CALM_S, calmly, complaints, loop_lag
from tests.support.sidecars.processes import until


def stand_still(seconds: float) -> None:
    until_s = monotonic() + seconds
    while monotonic() < until_s:
        pass


async def test_a_failure_on_a_calm_machine_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calm, "CALM_S", float("inf"))
    attempts: list[int] = []

    async def fail(attempt: int) -> None:
        attempts.append(attempt)
        pytest.fail("too slow")

    with pytest.raises(pytest.fail.Exception, match="too slow"):
        await calmly(fail)
    assert attempts == [0]


async def test_a_failure_while_the_process_stood_still_is_tried_again() -> None:
    async def stall_once(attempt: int) -> int:
        if not attempt:
            stand_still(0.4)
            raise TimeoutError
        return attempt

    assert await calmly(stall_once) == 1


async def test_a_machine_that_never_is_calm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calm, "CALM_S", -1.0)
    attempts: list[int] = []

    async def fail(attempt: int) -> None:
        attempts.append(attempt)
        raise TimeoutError

    with pytest.raises(AssertionError, match="never calm") as failed:
        await calmly(fail)
    assert isinstance(failed.value.__cause__, TimeoutError)
    assert attempts == list(range(ATTEMPTS))


async def test_the_lag_of_the_loop_is_seen_also_when_it_is_over() -> None:
    async with loop_lag() as lag_s:
        stand_still(0.4)
        assert lag_s() > 0.3
        await asyncio.sleep(0.1)
        assert lag_s() > 0.3


def test_a_store_seems_silent_only_while_the_process_stood_still() -> None:
    errors = "the store does not answer (127.0.0.1:1)\n\nno room\n"
    assert complaints(errors, CALM_S) == ["the store does not answer (127.0.0.1:1)", "no room"]
    assert complaints(errors, CALM_S + 0.1) == ["no room"]


async def test_the_awake_clock_goes_on_and_does_not_count_what_was_stood_still() -> None:
    async with awake_clock() as clock:
        began_s = clock()
        stand_still(1.0)
        await asyncio.sleep(0.03)
        assert clock() - began_s < 0.5

        async def went_on() -> bool:
            return clock() - began_s > 0.3

        await until(went_on)
