# SPDX-License-Identifier: Apache-2.0
"""Carries bytes between two connections, both ways, until one of them ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NamedTuple

from rdzv.race import first_of

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
