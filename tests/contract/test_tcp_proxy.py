# SPDX-License-Identifier: Apache-2.0
"""The proxy of the tests: it leaves no connection open, however soon it ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from rdzv.store.memory.server import EmbeddedServer
from tests.support.store.tcp_proxy import TcpProxy

DEADLINE_S = 90.0


@pytest.mark.parametrize("turns", range(12))
async def test_it_closes_what_has_just_connected(turns: int) -> None:
    """Whatever the loop has come to by then: a task that never ran closes nothing by itself."""
    async with EmbeddedServer() as server:
        async with TcpProxy(server.endpoint) as proxy:
            host, _, port = proxy.endpoint.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            for _ in range(turns):
                await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                while await reader.read(65536):
                    pass
        writer.close()
