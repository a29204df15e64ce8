# SPDX-License-Identifier: Apache-2.0
"""The kernel of the loops: nothing is lost, late, doubled or said twice; one wait ends others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, cast
from unittest.mock import patch

import pytest

from rdzv.job import JobClient
from rdzv.mirror import Mirror
from rdzv.pacing import Doubling
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler, Turn, first_of
from rdzv.store import Compare, Operation, Put
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.sidecars.cable import Cable, CabledStore, Moment
from tests.support.sidecars.jobs import KEYS
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

KEY = KEYS.in_generation(1).prefix + "counted"
MEMBER = KEYS.in_generation(1).member("a")
LEASE = 7
LONG_S = 600.0


class Counter(Reconciler):
    """A loop that brings a stored number to ``wanted``, in its ``turn``."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel, "counter")
        self.wanted = 0
        self.looks = 0
        self.look_s = 0.0
        self.due_s = math.inf
        self.written = 0
        self.until_s = math.inf
        self.turn: Turn | None = None

    @property
    def stored(self) -> int:
        kv = self.kernel.client.mirror.kvs.get(KEY)
        return 0 if kv is None else int(kv.value)

    async def step(self) -> Outlook:
        self.looks += 1
        mirror, wanted = self.kernel.client.mirror, self.wanted
        kv, sequence = mirror.kvs.get(KEY), mirror.sequence
        await asyncio.sleep(self.look_s)
        if now() >= self.due_s:
            wanted += 1
        write = None
        if wanted != (int(kv.value) if kv else 0):
            known = Compare(KEY, "mod", "=", kv.mod_revision if kv else 0)
            put = Put(KEY, str(wanted).encode())
            write = DueWrite(
                lambda: ([known], [put]), written=self._count, turn=self.turn, until_s=self.until_s
            )
        return Outlook(partial(mirror.changed_after, sequence), self.due_s, write)

    def _count(self) -> None:
        self.written += 1


class Bench:
    """A loop on a store of its own, whose registration is given and taken by hand."""

    def __init__(self) -> None:
        self.cable = Cable()
        self.cable.on_txn = self._pass
        self.client = JobClient.of(CabledStore(MemoryEngine(now), self.cable), KEYS, clock=now)
        self.lease: int | None = LEASE
        self.again = asyncio.Event()
        self.kernel = Kernel(self.client, self._fence, self.again.wait, now, Random(1))
        self.loop = Counter(self.kernel)
        self.sent = 0

    def _fence(self) -> Sequence[Compare] | None:
        return None if self.lease is None else (Compare(MEMBER, "lease", "=", self.lease),)

    def _pass(self, moment: Moment, operations: Sequence[Operation]) -> None:
        self.sent += moment == "sending" and any(one.key == KEY for one in operations)

    async def settles(self) -> None:
        await asyncio.sleep(LONG_S)
        assert self.loop.stored == self.loop.wanted + (now() >= self.loop.due_s)


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    one = Bench()
    store = one.client.store
    await store.lease_grant(LEASE, 10 * round(LONG_S))
    await store.txn([], [Put(MEMBER, b"{}", LEASE)])
    async with beside(one.client.watching.run()):
        await one.client.mirror.changed_after(0)
        async with beside(one.loop.run()):
            await asyncio.sleep(1)
            yield one


async def a_call_during_a_look_is_heard() -> None:
    async with bench() as one:
        one.loop.look_s = 5.0
        one.loop.wake()
        await asyncio.sleep(2)
        one.loop.wanted = 1
        one.loop.wake()
        await one.settles()


async def what_is_due_by_time_is_done_then() -> None:
    async with bench() as one:
        one.loop.due_s = now() + 60
        one.loop.wake()
        await one.settles()


async def each_decision_is_sent_once() -> None:
    async with bench() as one:
        for wanted in (1, 2, 3):
            one.loop.wanted = wanted
            one.loop.wake()
            await one.settles()
        assert (one.sent, one.loop.written) == (3, 3)


async def a_turn_comes_though_those_before_are_away() -> None:
    async with bench() as one:
        one.loop.turn = Turn("a", [f"m{n}" for n in range(200)], 5.0)
        one.loop.wanted = 1
        one.loop.wake()
        await asyncio.sleep(30)
        # Changes that are not of it do not begin its turn again.
        await one.client.store.txn([], [Put(KEY + "/other", b"")])
        await asyncio.sleep(1)
        assert one.sent == 0
        assert one.kernel.stuck_s() == {("counter", "turn"): pytest.approx(31, abs=0.1)}
        await asyncio.sleep(30)
        assert one.loop.stored == 1


async def nothing_is_written_without_a_registration() -> None:
    async with bench() as one:
        one.lease = None
        one.loop.wanted = 1
        one.loop.wake()
        await asyncio.sleep(60)
        assert one.sent == 0
        assert one.kernel.stuck_s() == {("counter", "lease"): pytest.approx(60)}
        one.lease = LEASE
        one.again.set()
        await one.settles()
        assert one.kernel.stuck_s() == {("counter", ""): 0.0}


async def a_lease_that_is_another_s_writes_nothing() -> None:
    async with bench() as one:
        one.lease = LEASE + 1
        one.loop.wanted = 1
        one.loop.wake()
        await asyncio.sleep(LONG_S)
        assert one.loop.stored == 0
        assert one.loop.stuck[0] == "race"


async def a_store_that_is_away_is_asked_at_a_pace() -> None:
    async with bench() as one:
        one.cable.cut()
        one.loop.wanted = 1
        one.loop.wake()
        await asyncio.sleep(60)
        assert one.loop.stuck[0] == "store"
        assert one.loop.looks < 500
        one.cable.mend()
        await one.settles()


async def an_answer_is_not_awaited_beyond_the_time_that_a_write_has() -> None:
    async with bench() as one:
        one.cable.jam(KEY)
        one.loop.wanted, one.loop.until_s = 1, now() + 2
        one.loop.wake()
        await asyncio.sleep(2.2)
        assert one.loop.stuck[0] == "deadline"
        one.cable.mend()
        await one.settles()


async def a_file_that_the_disk_refuses_is_tried_again() -> None:
    async with bench() as one:
        refusals = iter([OSError(28, "No space left on device")] * 3)

        def put() -> None:
            if (error := next(refusals, None)) is not None:
                raise error

        step = one.loop.step

        async def puts() -> Outlook:
            await one.loop.put(put, lambda error: None)
            return await step()

        with patch.object(one.loop, "step", puts):
            one.loop.wake()
            await asyncio.sleep(0.3)
            assert one.loop.stuck[0] == "disk"
            await asyncio.sleep(1)
        assert next(refusals, None) is None
        assert one.loop.stuck == ("", 0.0)


PROMISES = [
    a_call_during_a_look_is_heard,
    what_is_due_by_time_is_done_then,
    each_decision_is_sent_once,
    a_turn_comes_though_those_before_are_away,
    nothing_is_written_without_a_registration,
    a_lease_that_is_another_s_writes_nothing,
    a_store_that_is_away_is_asked_at_a_pace,
    an_answer_is_not_awaited_beyond_the_time_that_a_write_has,
    a_file_that_the_disk_refuses_is_tried_again,
]


@pytest.mark.parametrize("promise", PROMISES)
async def test_the_kernel_keeps(promise: Callable[[], Coroutine[None, None, None]]) -> None:
    await promise()


async def looks_then_forgets(self: Reconciler) -> Outlook:
    """A step whose calls are forgotten: the call is taken to be older than the look."""
    step = await Counter.step(cast(Counter, self))
    self._woken = False
    return step


class Forgetful(Counter):
    """A loop that loses the calls of the time in which it looks."""

    step = looks_then_forgets


async def sent_twice(self: Reconciler, write: DueWrite) -> None:
    """Send a write, and send it once more."""
    compares, operations = write.writes()
    await self.kernel.client.store.txn(compares, operations)
    await _write(self, write)


_write = Reconciler._write

BUGS: dict[str, tuple[Callable[[], Coroutine[None, None, None]], Callable[[], Any]]] = {
    "a lost wake-up": (
        a_call_during_a_look_is_heard,
        lambda: patch(f"{__name__}.Counter", Forgetful),
    ),
    "a missed deadline": (
        what_is_due_by_time_is_done_then,
        lambda: patch.object(Reconciler, "_timeout_s", lambda *_: math.inf),
    ),
    "a doubled write": (
        each_decision_is_sent_once,
        lambda: patch.object(Reconciler, "_write", sent_twice),
    ),
    "an old mirror": (each_decision_is_sent_once, lambda: patch.object(Mirror, "shown", nothing)),
    "a turn that never comes": (
        a_turn_comes_though_those_before_are_away,
        lambda: patch.object(Turn, "delay_s", lambda *_: math.inf),
    ),
    "no fence": (
        a_lease_that_is_another_s_writes_nothing,
        lambda: patch.object(Bench, "_fence", lambda _: ()),
    ),
    "no backoff": (
        a_store_that_is_away_is_asked_at_a_pace,
        lambda: patch("rdzv.reconcile.BACKOFF", Doubling(0.05, 0.05)),
    ),
}


async def nothing(*_: object) -> None:
    """Do nothing."""


@pytest.mark.parametrize("bug", BUGS)
async def test_a_kernel_with_a_bug_breaks_a_promise(bug: str) -> None:
    promise, plant = BUGS[bug]
    with plant(), pytest.raises(AssertionError):
        await promise()


def test_the_first_writes_at_once_and_the_number_of_writers_doubles_with_each_turn() -> None:
    members = [f"m{n}" for n in range(8)]
    delays = [Turn(one, members, 1.0).delay_s(0.0) for one in (*members, "stranger")]
    assert delays == [0, 1, 2, 2, 3, 3, 3, 3, 4]
    assert Turn("a", [], 1.0).delay_s(1.0) == 0.0


async def test_the_first_ends_the_others() -> None:
    ended: list[str] = []

    async def wait(s: float, name: str) -> str:
        try:
            await asyncio.sleep(s)
        finally:
            ended.append(name)
        return name

    assert await first_of(wait(3, "slow"), wait(1, "fast"), timeout_s=math.inf) == "fast"
    assert ended == ["fast", "slow"]
    assert await first_of(wait(3, "slow"), timeout_s=1.0) is None
    assert ended == ["fast", "slow", "slow"]


async def test_a_wait_that_fails_is_no_news() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await first_of(fail(), asyncio.Event().wait())
