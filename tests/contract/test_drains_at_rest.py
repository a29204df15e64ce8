# SPDX-License-Identifier: Apache-2.0
"""A sidecar looks at drains when there is something to see, and never as often as it can."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

import agent.parts
from agent.drain.decisions import DrainView
from launcher_shim.rundir import layout
from rdzv.drain.inputs import DrainingSnapshot, DrainPolicy
from rdzv.drain.transactions import cancel
from rdzv.records.drain import Drain
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.sidecars.drains import HERE, RUN, job
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual

OF_0_1 = Loop(of_0_1=True)


class Looks:
    """How often sidecars have looked at all there is to know of drains."""

    def __init__(self) -> None:
        self.count = 0

    async def during(self, seconds: float) -> int:
        """How often they do within so many seconds."""
        before = self.count
        await asyncio.sleep(seconds)
        return self.count - before


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    counted = Looks()
    snapshot: Callable[[DrainView], Awaitable[DrainingSnapshot]] = DrainView.snapshot

    async def counting(self: DrainView) -> DrainingSnapshot:
        counted.count += 1
        return await snapshot(self)

    monkeypatch.setattr(DrainView, "snapshot", counting)
    return counted


async def test_what_gone_pods_drained_is_left_to_the_sweep(looks: Looks) -> None:
    async with job("a") as one:
        gone = [Drain(f"uid-{n}", f"gone-{n}", "all go", "prestop", 1, 1) for n in range(120)]
        ended = [replace(drain, outcome="expired") for drain in gone]
        await one.put(*(Put(HERE.drain(drain.pod_uid), drain.to_json()) for drain in ended))
        await one.until(lambda: len(one.snapshot.drains) == len(gone))
        assert await looks.during(0.5) < 5
        assert len(one.snapshot.drains) == len(gone)


async def test_while_ranks_train_nobody_looks(looks: Looks) -> None:
    async with job("ab", trains="ab") as one:
        assert await looks.during(0.5) == 0
        for number in range(20):
            await one.put(Put(HERE.run(RUN).value(b"anything"), b"%d" % number))
        assert await looks.during(0.3) == 0


async def test_while_ranks_save_the_look_is_at_them_alone(looks: Looks) -> None:
    async with job("abc", trains="ab", loop=Loop(save_s=300)) as one:
        client = one.pods["a"].notice("sigterm", 120)
        await one.until(one.phase_is("commit"))
        client.leave()
        # Two gate writers read what their ranks say, ever less often.
        assert await looks.during(0.5) < 2 * 0.5 / 0.015 * 1.5
        assert one.commit.phase == "commit"


async def test_a_leaver_that_must_wait_until_its_deadline_keeps_nobody_busy(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.parts, "DrainPolicy", partial(DrainPolicy, done_s=0.1))
    async with job("ab", least=2, trains="ab", loop=Loop(save_s=0.5)) as one:
        client = one.pods["b"].notice("sigterm", 5)
        # After a save it trains on, but for the one that is its last chance: it stays saved.
        saved, count = 0, 0
        while not saved or saved != one.commit.epoch or one.commit.phase != "done":
            await one.until(one.phase_is("done"))
            saved = one.commit.epoch
            await asyncio.sleep(0.15)
            count = await looks.during(0.3)
        assert count < 30
        assert await client.release() == "committed"
        await one.until(lambda: one.snapshot.drains["uid-b"].outcome == "committed")


async def test_a_full_disk_keeps_nobody_busy_and_is_tried_again(looks: Looks) -> None:
    async with job("ab", below_min="commit", trains="ab", loop=OF_0_1) as one:
        one.pods["a"].disk_full = True
        client = one.pods["b"].notice("sigterm", 120)
        await one.until(one.phase_is("hold"))
        assert await looks.during(0.6) < 20
        assert one.commit.phase == "hold"
        one.pods["a"].disk_full = False
        assert await client.release() == "committed"
        one.pods["a"].disk_full = True
        again = one.pods["a"].notice("control", 20)
        assert (await again.last()).name == "released"
        one.pods["a"].disk_full = False
        await one.pods["a"].soon(lambda: one.pods["a"].kept() is not None)


async def test_a_gate_that_could_not_be_opened_is_opened_when_there_is_room() -> None:
    async with job("ab", least=2, trains="ab", loop=OF_0_1) as one:
        drained = one.pods["b"]
        drained.notice("control", 60)
        await one.pods["a"].soon(lambda: all(pod.shown() == "done" for pod in one.pods.values()))
        one.pods["a"].disk_full = True
        planned = cancel(KEYS, one.snapshot, drained.uid)
        assert not isinstance(planned, str)
        await MemoryStore(one.engine).txn(*planned)
        await drained.soon(lambda: drained.shown(layout.GATE) == "idle")
        assert one.pods["a"].shown(layout.GATE) == "done"
        one.pods["a"].disk_full = False
        await one.goes_on()
