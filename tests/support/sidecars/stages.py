# SPDX-License-Identifier: Apache-2.0
"""A training container, whose torchruns come to their sidecar through its relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from launcher_shim.pod.relay import Relay
from launcher_shim.tcpstore import wire
from tests.support.ports import free_ports
from tests.support.sidecars.handlers import PATIENCE_S, Torchrun
from tests.support.sidecars.raw_client import connected


@asynccontextmanager
async def container(path: Path) -> AsyncIterator[int]:
    """One life of the training container: gives the port of its relay."""
    (port,) = free_ports(1)
    relay = Relay(port, str(path))
    await relay.listen()
    try:
        yield port
    finally:
        await relay.close()


async def ran(port: int, address: str = "10.0.0.1") -> int:
    """Run one torchrun that ends well; returns the size of its world."""
    async with asyncio.timeout(PATIENCE_S):
        one = await asyncio.to_thread(Torchrun, port, address)
        world = await asyncio.to_thread(one.form)
        await asyncio.to_thread(one.end_well)
    return world.size


async def passes(port: int, line: bytes, run_id: str = "digits") -> bool:
    """Ask as ``torchrun`` of the run directory does, before the image's own is started."""
    async with connected(port) as asking:
        key = wire.STAGE + run_id.encode()
        return await asking.ask(wire.CompareSet(key, b"", line)) == wire.PASSED
