# SPDX-License-Identifier: Apache-2.0
"""A c10d client for tests: one request, one answer, no torch."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from launcher_shim.c10d.state_codec import SENTINEL
from launcher_shim.tcpstore import wire

UNANSWERED = (wire.Set, wire.Append, wire.MultiSet, wire.QueuePush)
NUMBERS = (wire.Add, wire.NumKeys, wire.DeleteKey, wire.QueueLen)
BYTES = (wire.Check, wire.Wait, wire.Barrier, wire.CancelWait)

DEADLINE_S = 150.0
"""Ends the wait for an answer that does not come."""


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, request: wire.Request) -> None:
        self._writer.write(wire.encode(request))

    async def number(self) -> int:
        return int(struct.unpack("<q", await self._reader.readexactly(8))[0])

    async def vec(self) -> bytes:
        return await self._reader.readexactly(await self.number())

    async def byte(self) -> bytes:
        return await self._reader.readexactly(1)

    async def four_bytes(self) -> bytes:
        return await self._reader.readexactly(4)

    async def at_end(self) -> bool:
        return await self._reader.read(1) == b""

    async def ask(self, request: wire.Request, timeout_s: float = DEADLINE_S) -> bytes | int | None:
        """Send one request and return its answer."""
        self.send(request)
        async with asyncio.timeout(timeout_s):
            if isinstance(request, UNANSWERED):
                return None
            if isinstance(request, NUMBERS):
                return await self.number()
            if isinstance(request, BYTES):
                return await self.byte()
            return await self.vec()

    async def open_rendezvous(self, run_id: str) -> bytes:
        """Do what torch's back end does first."""
        key = f"/torch.rendezvous.{run_id}".encode()
        answer = await self.ask(wire.CompareSet(key, b"", SENTINEL))
        assert isinstance(answer, bytes)
        return answer


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[RawClient]:
    """Connect as torch does: the handshake, then a ping."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(wire.HANDSHAKE + wire.encode(wire.Ping(77)))
        assert await reader.readexactly(4) == struct.pack("<I", 77)
        yield RawClient(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
