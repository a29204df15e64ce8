# SPDX-License-Identifier: Apache-2.0
"""The idle connection between two sidecars, on real sockets: what ends it, and what does not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic

import pytest

from agent import neighbour as line
from agent.neighbour import Neighbour, PeerAway, PeerMute, TcpLine, dial
from agent.telemetry import http
from rdzv.records.job import Member
from tests.support.faults.cut_node import CutNode, cut_node
from tests.support.ports import free_ports
from tests.support.records import member
from tests.support.sidecars.processes import PATIENCE_S
from tests.support.sources import ROOT

PAGE = str(ROOT / "tests" / "support" / "scripts" / "peer_page.py")
STANDS_S = 5.0
"""For more than twice as long a machine that is gone would go unnoticed."""


class Peer:
    """The health server of another sidecar, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, who: Member) -> None:
        self.process = process
        self.who = who

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def peer(address: str = "127.0.0.1", before: Sequence[str] = ()) -> AsyncIterator[Peer]:
    """Start one, behind the words ``before``."""
    (port,) = free_ports(1)
    who = member("b", address=address, health_port=port)
    process = await asyncio.create_subprocess_exec(
        *(*before, sys.executable, PAGE, address, str(port), who.name),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readline() == b"serves\n"
        yield Peer(process, who)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def other(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peer]:
    # No connection is given up because this machine is slow.
    monkeypatch.setattr(line, "CONNECT_TIMEOUT_S", PATIENCE_S)
    async with peer() as found:
        yield found


async def open_line(who: Member) -> TcpLine:
    async with asyncio.timeout(PATIENCE_S):
        return await dial(who)


async def ended(one: TcpLine) -> bool:
    async with asyncio.timeout(PATIENCE_S):
        return await one.ended()


async def holds(one: TcpLine, seconds: float) -> None:
    """Assert that it is open all the time."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await one.ended()


async def test_a_peer_whose_process_stands_still_is_no_loss(other: Peer) -> None:
    one = await open_line(other.who)
    other.process.send_signal(signal.SIGSTOP)
    await holds(one, STANDS_S)
    other.process.send_signal(signal.SIGCONT)
    await holds(one, 1.0)
    one.close()


async def test_a_line_is_idle_beyond_the_time_limit_of_a_request(other: Peer) -> None:
    one = await open_line(other.who)
    await holds(one, http.REQUEST_TIMEOUT_S + 1)
    one.close()


async def test_a_peer_that_is_killed_closes_the_line_and_refuses_the_next(other: Peer) -> None:
    one = await open_line(other.who)
    await other.kill()
    assert not await ended(one)
    one.close()
    with pytest.raises(PeerAway) as away:
        await open_line(other.who)
    assert away.value.sign == "refused"


@pytest.fixture
def node() -> Iterator[CutNode]:
    with cut_node() as made:
        yield made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")
async def test_a_machine_that_is_cut_off_silently_is_seen(node: CutNode) -> None:
    async with peer(node.inside, node.command()) as far:
        one = await open_line(far.who)
        await asyncio.to_thread(node.cut)
        assert await ended(one)
        one.close()


async def test_another_member_s_page_is_not_given(other: Peer) -> None:
    with pytest.raises(PeerMute):
        await open_line(replace(other.who, name="c"))


async def test_a_server_that_closes_idle_connections_is_not_suspected() -> None:
    """As one would that knows no such page, or is too busy to hold one."""
    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()
        asked.set()

    (port,) = free_ports(1)
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        who = member("b", address="127.0.0.1", health_port=port)
        signs = []
        neighbour = Neighbour(who, dial, monotonic, lambda: signs.append(neighbour.sign))
        running = asyncio.create_task(neighbour.run())
        for _ in range(2):
            async with asyncio.timeout(PATIENCE_S):
                await asked.wait()
            asked.clear()
        running.cancel()
        await asyncio.wait([running])
        assert signs
        assert set(signs) == {None}


async def test_of_too_many_the_oldest_closes(other: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [await open_line(other.who) for _ in range(http.HELD_MAX + 1)]
    assert not await ended(lines[0])
    await holds(lines[1], 0.5)
    await holds(lines[-1], 0.5)
    for one in lines:
        one.close()
