# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the store's contract, and the event loop that each test runs in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from rdzv.store.memory.server import EmbeddedServer
from tests.support.clocks.virtual import VirtualLoop
from tests.support.store.backend import _backing, backend, empty_store, etcd_cluster, store
from tests.support.store.secure import secure_etcd_cluster

__all__ = [
    "_backing",
    "backend",
    "empty_store",
    "etcd_cluster",
    "pytest_asyncio_loop_factories",
    "secure_etcd_cluster",
    "store",
]


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    """The store in memory as the sidecars of a test reach it."""
    async with EmbeddedServer() as running:
        yield running


LoopFactories = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """Choose the loops: the sidecar runs on uvloop, its parts must run on either.

    What needs neither sockets nor threads is marked ``virtual``, and waits for nothing.
    """
    if item.get_closest_marker("virtual"):
        return {"virtual": VirtualLoop}
    if item.path.name in ("test_c10d_server.py", "test_peer_lines.py"):
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
