# SPDX-License-Identifier: Apache-2.0
"""The sidecar's HTTP server: three pages, bounded requests, and nothing that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from time import monotonic

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.config import Config
from agent.telemetry import http
from agent.telemetry.http import LoopLag, serving
from agent.telemetry.metrics import Metrics
from rdzv.errors import ConfigError
from rdzv.settings import load
from tests.support.ports import free_ports
from tests.support.sidecars.processes import PATIENCE_S


class Pages:
    """The state behind the pages, and a client."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.config = load(
            Config,
            {"job": "x", "min_nodes": "1", "max_nodes": "1", "http_port": str(self.port)},
            {},
        )
        self.reason: str | None = "not registered yet"
        self.lag = LoopLag(monotonic)
        self.metrics = Metrics()
        self.source: str | None = None

    async def send(self, request: bytes) -> bytes:
        local = (self.source, 0) if self.source else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=local)
        try:
            writer.write(request)
            writer.write_eof()
            async with asyncio.timeout(PATIENCE_S):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def get(self, path: str) -> bytes:
        return await self.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


@pytest.fixture
async def pages(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pages]:
    # No client is given up as slow, however slow this machine is.
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 3600.0)
    found = Pages()
    async with serving(found.config, found.lag, lambda: found.reason, found.metrics):
        yield found


async def test_the_three_pages(pages: Pages) -> None:
    assert (await pages.get("/healthz")).startswith(b"HTTP/1.1 200 OK\r\n")
    answer = await pages.get("/readyz?verbose")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert answer.endswith(b"\r\n\r\nnot registered yet\n")
    pages.reason = None
    assert (await pages.get("/readyz")).endswith(b"\r\n\r\nready\n")
    metrics = await pages.get("/metrics")
    assert b"Content-Type: text/plain; version=0.0.4" in metrics
    assert b"muster_store_errors_total" in metrics
    head, _, body = metrics.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head


async def test_a_head_has_no_body_and_nothing_else_is_allowed(pages: Pages) -> None:
    answer = await pages.send(b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"\r\n\r\n")
    assert (await pages.send(b"POST /healthz HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
    assert (await pages.get("/env")).startswith(b"HTTP/1.1 404 ")
    for junk in (b"", b"\r\n\r\n", b"GET /healthz\r\n\r\n", b"\x16\x03\x01\x00\r\n\r\n"):
        assert (await pages.send(junk)).startswith(b"HTTP/1.1 400 ")


async def test_a_loop_that_cannot_keep_time_is_not_healthy() -> None:
    found = Pages()
    readings = chain([0.0], repeat(100.0))
    found.lag = LoopLag(lambda: next(readings))
    probing = asyncio.create_task(found.lag.run())
    async with serving(found.config, found.lag, lambda: None, found.metrics):
        async with asyncio.timeout(PATIENCE_S):
            while found.lag.worst_s < http.UNHEALTHY_LAG_S:  # noqa: ASYNC110 - a number, no event
                await asyncio.sleep(0.05)
        assert (await found.get("/healthz")).startswith(b"HTTP/1.1 503 ")
        assert (await found.get("/readyz")).startswith(b"HTTP/1.1 200 ")
    probing.cancel()
    await asyncio.wait([probing])


async def test_a_slow_client_is_given_up(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", pages.port)
    writer.write(b"GET /healthz HT")
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()


@asynccontextmanager
async def flood(port: int, connections: int) -> AsyncIterator[None]:
    """Hold so many connections that ask for nothing, half of them a byte at a time.

    Each comes back when it is dropped.
    """
    held = asyncio.Semaphore(0)

    async def hold(number: int) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            held.release()
            try:
                while number % 2:
                    writer.write(b"G")
                    await writer.drain()
                    await asyncio.sleep(0.05)
                await reader.read()
            except ConnectionError:
                pass
            finally:
                writer.close()
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as tasks:
        holding = [tasks.create_task(hold(number)) for number in range(connections)]
        for _ in range(connections):
            await held.acquire()
        yield
        for task in holding:
            task.cancel()


@pytest.mark.parametrize("from_elsewhere", [True, False])
async def test_it_answers_under_a_flood_of_idle_and_slow_connections(
    pages: Pages, from_elsewhere: bool
) -> None:
    pages.reason = None
    pages.source = "127.0.0.2" if from_elsewhere else None
    async with flood(pages.port, http.CONNECTIONS_MAX + 50):
        for _ in range(20):
            assert (await pages.get("/readyz")).startswith(b"HTTP/1.1 200 ")
            assert (await pages.get("/healthz")).startswith(b"HTTP/1.1 200 ")


async def test_the_greediest_address_makes_room(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 4)

    async def connected(source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        made = await asyncio.open_connection("127.0.0.1", pages.port, local_addr=(source, 0))
        made[1].write(b"GET /readyz HTTP/1.1\r\n")
        # Answered: all that came before has been let in.
        assert (await pages.get("/healthz")).startswith(b"HTTP/1.1 200 ")
        return made

    pages.source = "127.0.0.9"
    modest = await connected("127.0.0.2")
    greedy = [await connected("127.0.0.3") for _ in range(2)]
    # With the client that looks, this is one more than there may be.
    greedy.append(await connected("127.0.0.3"))
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            assert await greedy[0][0].read() == b""
    for _, writer in (modest, *greedy[1:]):
        writer.write(b"\r\n")
    async with asyncio.timeout(PATIENCE_S):
        for reader, writer in (modest, *greedy[1:]):
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            writer.close()
    greedy[0][1].close()


async def test_it_ends_while_clients_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is closed is broken off by the end, and not given up as slow.
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 3600.0)
    found = Pages()
    async with serving(found.config, found.lag, lambda: None, found.metrics):
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        writer.write(b"GET /")
        assert (await found.get("/healthz")).startswith(b"HTTP/1.1 200 ")
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()


async def test_an_address_that_is_not_this_machines_is_told() -> None:
    found = Pages()
    flags = {
        "job": "x",
        "min_nodes": "1",
        "max_nodes": "1",
        "http_port": str(found.port),
        "address": "192.0.2.1",
    }
    config = load(Config, flags, {})
    with pytest.raises(ConfigError, match=r"--address \(MUSTER_ADDRESS\)"):
        async with serving(config, found.lag, lambda: None, found.metrics):
            pass


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(request=st.binary(max_size=300) | st.binary(max_size=40).map(lambda b: b"GET /" + b * 500))
async def test_i8_any_bytes_get_an_answer_and_end_nothing(pages: Pages, request: bytes) -> None:
    answer = await pages.send(request)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert (await pages.get("/healthz")).startswith(b"HTTP/1.1 200 ")
