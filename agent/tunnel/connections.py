# SPDX-License-Identifier: Apache-2.0
"""The connections of one end of the tunnel: closed when their peer is no longer a member."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from rdzv.reconcile import first_of
from rdzv.records.job import Member

READ_SIZE = 64 * 1024
"""Bytes that are read at once, and held for an end that does not take them."""


class Ends(NamedTuple):
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def relay(one: Ends, other: Ends, patience_s: float = 0.0) -> bool:
    """Carry bytes until one of the two has ended; the other has been sent what came before.

    Returns whether ``other`` has ended: it is waited for ``patience_s`` longer.
    """
    back = asyncio.create_task(_copy(other.reader, one.writer))
    try:
        await first_of(_copy(one.reader, other.writer), asyncio.shield(back))
        await asyncio.wait((back,), timeout=patience_s)
        return back.done()
    finally:
        back.cancel()
        await asyncio.gather(back, return_exceptions=True)
        for ends in (one, other):
            ends.writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # a connection that breaks has ended
        while data := await reader.read(READ_SIZE):
            writer.write(data)
            await writer.drain()


class Connections:
    """The open connections, each with the member at its other end once that is known."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], asyncio.StreamWriter | None] = {}
        self._peers: dict[asyncio.StreamWriter, Member] = {}

    @property
    def carrying(self) -> int:
        """The number of connections that carry a command."""
        return len(self._peers)

    @contextmanager
    def kept(self, writer: asyncio.StreamWriter | None = None) -> Iterator[None]:
        """Track the current task, and close ``writer`` at its end."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = writer
        try:
            yield
        finally:
            del self._tasks[task]
            if writer is not None:
                writer.close()

    @contextmanager
    def to(self, member: Member, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Track the member that ``writer`` leads to, and close ``writer`` at the end."""
        self._peers[writer] = member
        try:
            yield
        finally:
            del self._peers[writer]
            writer.close()

    def close_unless(self, present: Callable[[Member], bool]) -> list[Member]:
        """Close the connections whose peer is not present; return the peers of those."""
        gone = [(writer, one) for writer, one in self._peers.items() if not present(one)]
        for writer, _ in gone:
            writer.transport.abort()  # the peer may never take what is still to be sent
        return [member for _, member in gone]

    async def end(self) -> None:
        """Close all connections, and wait until their tasks have ended."""
        for writer in (*self._tasks.values(), *self._peers):
            if writer is not None:
                writer.transport.abort()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
