# SPDX-License-Identifier: Apache-2.0
"""Commands that change a job, or wait for it, while the store loses an answer or falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from agent.job_config import JobConfig
from console.job import drain as drain_command
from console.job import pause as pause_command
from console.job.reading import SILENCE_S
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.errors import MembershipError, StoreUnavailable
from rdzv.job import JobClient
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.settings import load
from rdzv.store import Delete, Operation, Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import drain, member
from tests.support.sidecars.jobs import KEYS, LosesOne, loaded
from tests.support.store.cut import Cut

pytestmark = pytest.mark.virtual

HERE = KEYS.in_generation(1)
RUN = HERE.run("digits")


class LosingCut(LosesOne, Cut):
    """A cable that can be cut, and loses what it carries."""


@dataclass
class Terminal:
    """Somebody's commands about a job of two that train, and the store that they go to."""

    engine: MemoryEngine
    cable: LosingCut = field(default_factory=LosingCut)
    config: JobConfig = field(
        default_factory=lambda: load(JobConfig, {"job": "digits", "namespace": "team"}, {})
    )

    async def put(self, *operations: Operation) -> None:
        assert (await MemoryStore(self.engine).txn([], operations)).succeeded

    async def drains(self) -> set[str]:
        read = await MemoryStore(self.engine).range(HERE.drains, prefix=True)
        return {kv.key for kv in read.kvs}

    def by_hand(self) -> drain_command.DrainByHand:
        return drain_command.DrainByHand(self.config, "b", "by hand", lambda *_: None)

    def drain(self) -> Coroutine[None, None, int]:
        return self.by_hand().drain(600.0, wait=True)

    def pause(self) -> Coroutine[None, None, int]:
        return pause_command._pause(self.config, "by hand", wait=True, as_json=False)


@pytest.fixture
async def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    one = Terminal(MemoryEngine(now))

    @asynccontextmanager
    async def connected(config: JobConfig) -> AsyncIterator[JobClient]:
        store = MemoryStore(one.engine, faults=one.cable)
        async with loaded(JobClient.of(store, KEYS, clock=now)) as client:
            yield client

    for command in (drain_command, pause_command):
        monkeypatch.setattr(command, "connected", connected)
    world = Round(7, True, frozen=(Seat("a", "n", 1), Seat("b", "n", 1)))
    await one.put(
        Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
        Put(RUN.round, world.to_json()),
        *(Put(HERE.member(name), member(name, version="0.2.0").to_json()) for name in "ab"),
    )
    return one


VERBS = {
    "drain": (Terminal.drain, "the drain of b goes on by itself"),
    "pause": (Terminal.pause, "job digits stays paused"),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_wait_ends_if_the_store_is_silent_for_long(terminal: Terminal, verb: str) -> None:
    begin, goes_on = VERBS[verb]
    waiting = asyncio.ensure_future(begin(terminal))
    await asyncio.sleep(5)
    terminal.cable.cut()
    began_s = now()
    with pytest.raises(StoreUnavailable) as ended:
        await asyncio.wait_for(waiting, 3600)
    assert SILENCE_S <= now() - began_s < SILENCE_S + 10
    assert str(ended.value) == (
        f"the store has not answered for {SILENCE_S:g} s: {goes_on}; see muster status, or wait"
        " again by the same command"
    )


@pytest.mark.parametrize("verb", VERBS)
async def test_a_store_silent_for_moments_ends_no_wait(terminal: Terminal, verb: str) -> None:
    waiting = asyncio.ensure_future(VERBS[verb][0](terminal))
    for _ in range(4):
        await asyncio.sleep(SILENCE_S / 2)
        terminal.cable.cut()
        await asyncio.sleep(SILENCE_S / 2)
        terminal.cable.mend()
    # The store answers, and nothing happens: nobody is impatient.
    await asyncio.sleep(10 * SILENCE_S)
    assert not waiting.done()
    await terminal.put(
        Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
        Put(HERE.drain("uid-b"), drain("b", "committed").to_json()),
    )
    assert await waiting in (0, 4)


async def test_a_cancel_whose_answer_is_lost_has_cancelled(terminal: Terminal) -> None:
    await terminal.put(Put(HERE.drain("uid-b"), drain("b", source="operator").to_json()))
    terminal.cable.loses = "answer"
    assert await terminal.by_hand().cancel() == 0
    assert await terminal.drains() == set()
    with pytest.raises(MembershipError, match="pod uid-b does not drain"):
        await terminal.by_hand().cancel()


async def test_a_cancel_spares_a_later_pod(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def replace_pod(call: str) -> None:
        if call != "txn" or HERE.drain("uid-b") not in await terminal.drains():
            return
        await terminal.put(
            Delete(HERE.drain("uid-b")),
            Put(HERE.member("b"), member("b", 3, uid="uid-b2").to_json()),
            Put(HERE.drain("uid-b2"), drain("b", uid="uid-b2").to_json()),
        )

    await terminal.put(Put(HERE.drain("uid-b"), drain("b", source="operator").to_json()))
    monkeypatch.setattr(terminal.cable, "before", replace_pod)
    assert await terminal.by_hand().cancel() == 0
    assert await terminal.drains() == {HERE.drain("uid-b2")}
