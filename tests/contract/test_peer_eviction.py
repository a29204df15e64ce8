# SPDX-License-Identifier: Apache-2.0
"""Sidecars as real processes: the node of one is cut off, and the others evict it.

No lease ends while a test lasts.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rdzv.keys import JobKeys
from rdzv.records.job import HistoryEntry
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.faults.cut_node import CutNode, cut_node
from tests.support.sidecars.processes import CONSOLE, PATIENCE_S, Sidecar, sidecar, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")

KEYS = JobKeys("default", "digits")


@pytest.fixture
def node() -> Iterator[CutNode]:
    with cut_node() as made:
        yield made


class Members:
    """Three members, the last of which is on the node."""

    def __init__(self, server: EmbeddedServer, sidecars: list[Sidecar]) -> None:
        self.store = MemoryStore(server.engine)
        self.sidecars = sidecars

    async def names(self) -> set[str]:
        read = await self.store.range(KEYS.in_generation(1).members, prefix=True)
        return {kv.key.rpartition("/")[2] for kv in read.kvs}

    async def losses(self) -> list[tuple[str, object]]:
        read = await self.store.range(KEYS.history, prefix=True)
        entries = map(HistoryEntry.from_kv, read.kvs)
        return [(one.member, one.details.get("early")) for one in entries if one.what == "lost"]

    async def lines(self) -> bool:
        """Whether each holds a line to each."""
        told = [(await one.get("/metrics"))[1] for one in self.sidecars]
        return all('muster_peers{state="reached"} 2.0' in text for text in told)


@pytest.fixture
async def members(node: CutNode, tmp_path: Path) -> AsyncIterator[Members]:
    async with EmbeddedServer(f"{node.outside}:0") as server, AsyncExitStack() as stack:
        sidecars = []
        places = [(node.outside, CONSOLE), (node.outside, CONSOLE), (node.inside, node.runner)]
        for number, (address, runner) in enumerate(places):
            name = f"node-{number}"
            one = sidecar(server.endpoint, tmp_path / name, name, runner, MUSTER_ADDRESS=address)
            sidecars.append(await stack.enter_async_context(one))
            await sidecars[-1].until_ready()
        found = Members(server, sidecars)
        await until(found.lines)
        yield found


async def test_a_node_that_is_cut_off_is_evicted(members: Members, node: CutNode) -> None:
    await asyncio.to_thread(node.unplug)

    async def evicted() -> bool:
        return await members.names() == {"node-0", "node-1"}

    await until(evicted, PATIENCE_S)
    assert await members.losses() == [("node-2", True)]


async def test_i5_a_sidecar_that_stands_still_is_not(members: Members) -> None:
    still = members.sidecars[2].process
    still.send_signal(signal.SIGSTOP)
    await asyncio.sleep(8.0)
    assert len(await members.names()) == 3
    still.send_signal(signal.SIGCONT)
    await until(members.lines)
    assert await members.losses() == []
