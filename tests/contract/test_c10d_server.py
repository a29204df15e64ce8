# SPDX-License-Identifier: Apache-2.0
"""The server's own promises: order, patience, bounds, and what one client can do to others."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from launcher_shim.c10d.endpoint import HELD_MAX, C10dServer
from launcher_shim.c10d.request_order import PARKED_MAX, RelayNumbers
from launcher_shim.tcpstore import wire
from rdzv.errors import ConfigError, StoreUnavailable
from tests.support.sidecars.c10d_memory import MemorySession, MemoryStore
from tests.support.sidecars.listeners import listening_on, loopbacks
from tests.support.sidecars.processes import PATIENCE_S, until

HELLO = wire.HANDSHAKE + wire.encode(wire.Ping(7))


class StepSession:
    """Answers a request when the test says so; ``handled`` are those that have reached it."""

    def __init__(self, peer: str, relay: RelayNumbers | None = None) -> None:
        self.peer = peer
        self.relay = relay
        self.handled: list[wire.Request] = []
        self.results: list[asyncio.Future[bytes]] = []
        self.is_closed = asyncio.Event()
        self.progress = asyncio.Event()
        self.whole: dict[bytes, bytes] = {}

    def keep(self, data: bytes, requests: Sequence[wire.Request]) -> None:
        pass

    def handle(self, request: wire.Request) -> bytes | Awaitable[bytes]:
        self.handled.append(request)
        self.results.append(asyncio.get_running_loop().create_future())
        self.progress.set()
        return self.results[-1]

    def closed(self) -> None:
        self.is_closed.set()

    async def reached(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.handled) < count:
                self.progress.clear()
                await self.progress.wait()


class Client:
    """Raw frames over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *requests: wire.Request) -> None:
        self.writer.write(b"".join(map(wire.encode, requests)))

    async def take(self, size: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readexactly(size)

    async def ended(self) -> bytes:
        """Wait for the server to close; return what it sent before."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionResetError, BrokenPipeError):
            return


@asynccontextmanager
async def connected(port: int, hello: bytes = HELLO) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    try:
        client.writer.write(hello)
        if hello == HELLO:
            assert await client.take(4) == wire.pong(7)
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def serving(
    open_session: Callable[[str, RelayNumbers | None], object], **limits: float
) -> AsyncIterator[tuple[C10dServer, int]]:
    server = C10dServer(open_session, **limits)  # type: ignore[arg-type]
    try:
        yield server, await server.listen_loopback(0)
    finally:
        await server.close()


class Sessions(list[StepSession]):
    """Opens sessions of a kind, and keeps them."""

    def __init__(self, kind: type[StepSession] = StepSession) -> None:
        super().__init__()
        self._kind = kind

    def __call__(self, peer: str, relay: RelayNumbers | None) -> StepSession:
        self.append(self._kind(peer, relay))
        return self[-1]


@asynccontextmanager
async def stepping(**limits: float) -> AsyncIterator[tuple[Client, StepSession]]:
    sessions = Sessions()
    async with serving(sessions, **limits) as (_, port), connected(port) as client:
        yield client, sessions[0]


@asynccontextmanager
async def storing(
    kind: type[MemorySession] = MemorySession,
) -> AsyncIterator[tuple[MemoryStore, int]]:
    """A server of sessions that share a store in memory, and its port."""
    store = MemoryStore()
    async with serving(lambda peer, relay: kind(store)) as (_, port):
        yield store, port


def the_record(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The only warning or error that was logged."""
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    return record


# --- order ---


async def test_a_later_request_waits_for_an_earlier_one() -> None:
    async with stepping() as (client, session):
        client.send(wire.Set(b"/a", b"1"), wire.Get(b"/a"), wire.Ping(9))
        await session.reached(1)
        assert session.handled == [wire.Set(b"/a", b"1")]
        session.results[0].set_result(b"")
        await session.reached(2)
        session.results[1].set_result(wire.vec(b"1"))
        assert await client.take(13) == wire.vec(b"1") + wire.pong(9)


async def test_a_cancel_that_comes_too_late_is_answered_too() -> None:
    async with stepping() as (client, session):
        client.send(wire.Wait((b"/a",)))
        await session.reached(1)
        session.results[0].set_result(wire.STOP_WAITING)
        assert await client.take(1) == wire.STOP_WAITING
        client.send(wire.CancelWait())
        assert await client.take(1) == wire.WAIT_CANCELED


# --- the end of a connection ---


async def test_the_session_learns_that_its_client_is_gone() -> None:
    async with stepping() as (client, session):
        client.send(wire.Wait((b"/a",)), wire.Get(b"/b"))
        await session.reached(2)
        await client.close()
        async with asyncio.timeout(PATIENCE_S):
            await session.is_closed.wait()
        assert all(result.cancelled() for result in session.results)


async def test_what_a_client_set_before_it_went_is_stored() -> None:
    async with stepping() as (client, session):
        first, lost, last = wire.Set(b"/a", b"1"), wire.Get(b"/b"), wire.Append(b"/a", b"2")
        client.send(wire.Wait((b"/c",)), first, lost, last)
        await session.reached(2)
        await client.close()
        await asyncio.wait(session.results[:1], timeout=PATIENCE_S)
        assert [result.cancelled() for result in session.results] == [True, False]
        assert not session.is_closed.is_set()
        session.results[1].set_result(b"")
        await session.reached(3)
        assert session.handled[1:] == [first, last]
        session.results[2].set_result(b"")
        async with asyncio.timeout(PATIENCE_S):
            await session.is_closed.wait()


async def test_what_a_client_set_before_it_went_is_not_tried_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stepping(last_writes_timeout_s=0.1) as (client, session):
        client.send(wire.Set(b"/a", b"1"), wire.Set(b"/a", b"2"))
        await session.reached(1)
        done, _ = await asyncio.wait(session.results, timeout=0.2)
        assert not done
        await client.close()
        async with asyncio.timeout(PATIENCE_S):
            await session.is_closed.wait()
        assert session.results[0].cancelled()
        assert len(session.handled) == 1
    assert "not stored within 0.1 s" in caplog.text


async def test_close_cancels_what_is_under_way() -> None:
    sessions = Sessions()
    async with serving(sessions) as (server, port), connected(port) as client:
        client.send(wire.Wait((b"/a",)), wire.Set(b"/b", b""))
        await sessions[0].reached(2)
        await server.close()
        assert all(result.cancelled() for result in sessions[0].results)
        assert sessions[0].is_closed.is_set()
        assert await client.ended() == b""


@pytest.mark.parametrize("turns", range(6))
async def test_a_client_that_comes_as_the_server_closes_is_closed_too(turns: int) -> None:
    async with serving(StepSession) as (server, port):
        with socket.socket() as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()
            async with asyncio.timeout(PATIENCE_S):
                with suppress(ConnectionResetError):
                    assert await loop.sock_recv(client, 1) == b""


@pytest.mark.parametrize("turns", range(6))
def test_clients_that_come_as_the_server_closes_are_closed_though_the_loop_ends_then(
    turns: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "c10d.sock")

    async def come_and_close() -> None:
        server = C10dServer(StepSession)
        await server.listen_unix(path)
        for client in clients:
            client.setblocking(False)
            client.connect(path)
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()

    with ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(8)]
        asyncio.run(come_and_close())
        for client in clients:
            client.settimeout(PATIENCE_S)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        # A socket that was left to the garbage collector fails this test.
        gc.collect()


# --- errors ---


class FailingSession(MemorySession):
    """Fails on some keys."""

    def handle(self, request: wire.Request) -> bytes | Awaitable[bytes]:
        match request:
            case wire.Get(b"/defect"):
                raise ZeroDivisionError
            case wire.Get(b"/later defect"):
                return self._fail_later(ZeroDivisionError())
            case wire.Get(b"/refused"):
                raise StoreUnavailable("the store is away")
            case wire.Wait((b"/defect",)):
                return self._fail_later(ZeroDivisionError())
        return super().handle(request)

    async def _fail_later(self, error: Exception) -> bytes:
        raise error


@pytest.mark.parametrize(
    "request_", [wire.Get(b"/defect"), wire.Get(b"/later defect"), wire.Wait((b"/defect",))]
)
async def test_i8_a_defect_closes_one_connection_and_is_logged(
    request_: wire.Request, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        storing(FailingSession) as (_, port),
        connected(port) as victim,
        connected(port) as other,
    ):
        victim.send(wire.Ping(1), request_)
        assert await victim.ended() == wire.pong(1)
        other.send(wire.Set(b"/a", b"1"), wire.Get(b"/a"))
        assert await other.take(9) == wire.vec(b"1")
    record = the_record(caplog)
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_i8_a_defect_in_opening_a_session_closes_one_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    opened: list[str] = []

    def open_session(peer: str, relay: RelayNumbers | None) -> MemorySession:
        opened.append(peer)
        if len(opened) == 1:
            raise ZeroDivisionError
        return MemorySession(store)

    async with serving(open_session) as (_, port):
        async with connected(port, HELLO + wire.encode(wire.Set(b"/a", b"")) + b"\xff") as victim:
            assert await victim.ended() == b""
        async with connected(port) as other:
            other.send(wire.NumKeys())
            assert await other.take(8) == wire.i64(0)
    record = the_record(caplog)
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_a_refusal_closes_the_connection_with_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with storing(FailingSession) as (_, port), connected(port) as client:
        client.send(wire.Get(b"/refused"))
        assert await client.ended() == b""
    record = the_record(caplog)
    assert record.getMessage().endswith("the store is away")
    assert record.exc_info is None


@pytest.mark.parametrize(
    ("hostile", "sentence"),
    [
        (b"\xff" * 64, "no torch TCPStore"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "no torch TCPStore"),
        (b"\x03" + struct.pack("<Q", 12) + b"/init", "torch before 2.2"),
        (wire.HANDSHAKE + b"\x63", "no TCPStore operation 99"),
        (wire.HANDSHAKE + b"\x03" + b"\xff" * 8, "a key of"),
        (wire.HANDSHAKE + b"\x0b" + b"\x00" * 7 + b"\x01", "keys in one request"),
    ],
)
async def test_i8_bad_bytes_fail_their_connection_alone(
    hostile: bytes, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with storing() as (_, port), connected(port) as other, connected(port, hostile) as client:
        assert await client.ended() == b""
        other.send(wire.Add(b"/a", 1))
        assert await other.take(8) == wire.i64(1)
    record = the_record(caplog)
    assert sentence in record.getMessage()


async def test_requests_before_a_bad_one_are_answered() -> None:
    async with stepping() as (client, session):
        client.writer.write(wire.encode(wire.Set(b"/a", b"")) + wire.encode(wire.Ping(9)) + b"\xff")
        await session.reached(1)
        session.results[0].set_result(b"")
        assert await client.ended() == wire.pong(9)


# --- bounds ---


async def test_i8_a_client_that_never_greets_is_closed() -> None:
    async with (
        serving(StepSession, handshake_timeout_s=3600.0) as (server, port),
        connected(port) as greeted,
    ):
        server._host = replace(server._host, handshake_timeout_s=0.2)
        async with connected(port, b"\x00\xce") as silent:
            assert await silent.ended() == b""
        greeted.send(wire.Ping(9))
        assert await greeted.take(4) == wire.pong(9)


async def test_i8_connections_are_limited_and_free_again() -> None:
    # Who is closed is turned away, and not given up for its silence.
    limits = {"connections_max": 2, "handshake_timeout_s": 3600.0}
    async with serving(StepSession, **limits) as (_, port), connected(port) as first:
        async with connected(port), connected(port, b"") as third:
            assert await third.ended() == b""
            first.send(wire.Ping(1))
            assert await first.take(4) == wire.pong(1)
        async with asyncio.timeout(PATIENCE_S):
            while not await answers(port):
                pass


async def answers(port: int) -> bytes:
    """What a new client gets for its greeting; nothing if it is turned away."""
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    client.writer.write(HELLO)
    try:
        return await client.reader.read(4)
    except ConnectionResetError:
        return b""
    finally:
        await client.close()


async def test_i8_a_client_is_not_read_while_it_runs_ahead() -> None:
    async with stepping() as (client, session):
        client.send(wire.Get(b"/first"))
        await session.reached(1)
        client.writer.write(wire.encode(wire.Get(b"/later" + b"x" * 1000)) * 20_000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.writer.drain(), 0.3)
        assert len(session.handled) == 1
        session.results[0].set_result(wire.vec(b""))
        await session.reached(2)
        client.writer.transport.abort()


async def test_i8_answers_that_nobody_reads_are_not_made() -> None:
    made = 0

    class LargeSession(MemorySession):
        def handle(self, request: wire.Request) -> bytes | Awaitable[bytes]:
            nonlocal made
            made += 1
            return wire.vec(b"v" * 1_000_000)

    async with (
        storing(LargeSession) as (_, port),
        connected(port) as client,
        connected(port) as other,
    ):
        client.send(*[wire.Get(b"/big")] * 100)
        for nonce in range(50):
            other.send(wire.Ping(nonce))
            assert await other.take(4) == wire.pong(nonce)
        assert made < 50
        for _ in range(100):
            await client.take(1_000_008)
        assert made == 100


async def test_i8_a_flood_of_requests_leaves_others_their_turn() -> None:
    handled = 0
    handled_at_turn: list[int] = []

    class CountingSession(MemorySession):
        def handle(self, request: wire.Request) -> bytes | Awaitable[bytes]:
            nonlocal handled
            if not handled:
                loop = asyncio.get_running_loop()
                loop.call_soon(lambda: handled_at_turn.append(handled))
            handled += 1
            return super().handle(request)

    async with storing(CountingSession) as (_, port), connected(port) as client:
        client.send(*[wire.Add(b"/flood", 1)] * 5_000)
        assert await client.take(8 * 5_000)
    assert handled == 5_000
    assert handled_at_turn[0] < 1_000


async def test_i8_an_answer_beyond_all_bounds_closes_its_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with storing() as (store, port), connected(port) as client:
        store.values[b"/big"] = b"v" * 1_000_000
        client.send(wire.MultiGet((b"/big",) * wire.KEYS_MAX))
        assert await client.ended() == b""
    record = the_record(caplog)
    assert "an answer of more than" in record.getMessage()
    assert record.exc_info is None


async def test_i8_too_many_waits_of_one_client_close_it() -> None:
    async with stepping() as (client, session):
        client.send(*[wire.Wait((b"/a",))] * (PARKED_MAX + 1))
        assert await client.ended() == b""
        assert all(result.cancelled() for result in session.results)


async def test_i8_unfinished_requests_are_bounded_over_all_clients() -> None:
    head = wire.HANDSHAKE + b"\x0b" + struct.pack("<Q", 8)
    item = wire.vec(b"k") + wire.vec(b"v" * (wire.VALUE_MAX - 64))
    async with storing() as (_, port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in clients:
            writer.write(head + item * 3)
        assert 3 * len(item * 3) > HELD_MAX
        ends = [asyncio.create_task(reader.read()) for reader, _ in clients]
        done, _ = await asyncio.wait(ends, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        for _, writer in clients:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)


# --- where it listens ---


async def test_i9_it_listens_on_loopback_alone() -> None:
    async with serving(StepSession) as (_, port):
        assert await asyncio.to_thread(listening_on, port) == loopbacks()


async def test_both_loopback_addresses_serve() -> None:
    async with serving(StepSession) as (_, port):
        for address in loopbacks():
            client = Client(*await asyncio.open_connection(address, port))
            client.writer.write(HELLO)
            assert await client.take(4) == wire.pong(7)
            await client.close()


async def test_a_taken_port_is_a_users_mistake() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
            await C10dServer(StepSession).listen_loopback(port)


async def test_the_unix_socket_is_for_every_user_and_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "c10d.sock"
    sessions = Sessions()
    old, new = C10dServer(sessions), C10dServer(sessions)
    await old.listen_unix(str(path))
    await new.listen_unix(str(path))
    await old.close()
    status = await asyncio.to_thread(path.stat)
    assert stat.S_IMODE(status.st_mode) == 0o666
    client = Client(*await asyncio.open_unix_connection(path))
    client.writer.write(HELLO)
    assert await client.take(4) == wire.pong(7)
    assert sessions[0].peer == f"process {os.getpid()} of user {os.getuid()}"
    await client.close()
    await new.close()
    assert await asyncio.to_thread(os.listdir, tmp_path) == []


async def test_a_socket_path_too_long_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        await C10dServer(StepSession).listen_unix(str(tmp_path / ("x" * 100)))


# --- behind a relay ---


class Seen(StepSession):
    """Notes under which number each request has come, and whether it may be a repetition."""

    def handle(self, request: wire.Request) -> bytes | Awaitable[bytes]:
        assert self.relay is not None
        self.numbers.append((self.relay.number, self.relay.again))
        return super().handle(request)

    def __init__(self, peer: str, relay: RelayNumbers | None) -> None:
        super().__init__(peer, relay)
        self.numbers: list[tuple[int, bool]] = []


@asynccontextmanager
async def relayed(preface: wire.Preface) -> AsyncIterator[tuple[C10dServer, Client, Seen]]:
    sessions = Sessions(Seen)
    async with (
        serving(sessions) as (server, port),
        connected(port, preface.encode() + wire.HANDSHAKE) as client,
    ):
        client.send(wire.Ping(7))
        repeated = bool(preface.again)
        number = preface.again[0] if repeated else preface.following
        assert await client.take(20) == wire.numbered(number, wire.pong(7))
        (session,) = sessions
        assert isinstance(session, Seen)
        yield server, client, session


SESSION = b"s" * wire.SESSION_BYTES


async def test_behind_a_relay_each_answer_comes_under_its_number_and_silence_is_confirmed() -> None:
    async with relayed(wire.Preface(SESSION)) as (_, client, session):
        client.send(wire.Wait((b"/w",)), wire.Set(b"/a", b"1"), wire.Get(b"/a"))
        await session.reached(2)
        session.results[1].set_result(b"")
        await session.reached(3)
        session.results[2].set_result(wire.vec(b"1"))
        confirmed = wire.numbered(3, b"") + wire.numbered(4, wire.vec(b"1"))
        assert await client.take(len(confirmed)) == confirmed
        session.results[0].set_result(wire.STOP_WAITING)
        assert await client.take(17) == wire.numbered(2, wire.STOP_WAITING)
        client.send(wire.Wait((b"/w",)), wire.CancelWait())
        assert await client.take(17) == wire.numbered(6, wire.WAIT_CANCELED)
        assert session.results[3].cancelled()
        assert session.numbers == [(2, False), (3, False), (4, False), (5, False)]


async def test_what_may_have_been_carried_out_is_known_to_its_session() -> None:
    async with relayed(wire.Preface(SESSION, 9, (4, 6, 7), b"note")) as (_, client, session):
        assert session.relay is not None
        assert (session.relay.session, session.relay.note) == (SESSION, b"note")
        client.send(wire.Get(b"/a"), wire.Get(b"/b"), wire.Get(b"/c"), wire.Get(b"/d"))
        for count in range(1, 5):
            await session.reached(count)
            session.results[count - 1].set_result(b"")
        answers = b"".join(wire.numbered(number, b"") for number in (6, 7, 9, 10))
        assert await client.take(len(answers)) == answers
        assert session.numbers == [(6, True), (7, True), (9, False), (10, False)]


async def test_a_note_reaches_the_relay_before_the_answer_that_rests_on_it() -> None:
    async with relayed(wire.Preface(SESSION)) as (_, client, session):
        client.send(wire.Get(b"/a"))
        await session.reached(1)
        assert session.relay is not None
        for note in (b"one", b"one", b"two", bytes(wire.NOTE_MAX + 1)):
            session.relay.keep(note)
        session.results[0].set_result(wire.vec(b""))
        expected = wire.numbered(wire.NOTE, b"one") + wire.numbered(wire.NOTE, b"two")
        expected += wire.numbered(2, wire.vec(b""))
        assert await client.take(len(expected)) == expected


async def test_a_relay_is_told_to_close_its_client_but_not_when_the_sidecar_ends() -> None:
    async with relayed(wire.Preface(SESSION)) as (_, client, session):
        client.send(wire.Get(b"/a"))
        await session.reached(1)
        session.results[0].set_exception(StoreUnavailable("the store is away"))
        assert await client.ended() == wire.numbered(wire.REFUSAL, b"the store is away")
    async with relayed(wire.Preface(SESSION)) as (_, client, session):
        client.writer.write(b"\xff")
        refusal = wire.numbered(wire.REFUSAL, b"")[:8]
        ended = await client.ended()
        assert ended.startswith(refusal)
        assert ended.endswith(b"operation 255")
    async with relayed(wire.Preface(SESSION)) as (server, client, session):
        client.send(wire.Set(b"/a", b""))
        await session.reached(1)
        await server.close()
        assert await client.ended() == b""
        assert session.results[0].cancelled()


async def test_known_bytes_are_answered_as_a_whole_and_only_where_a_request_begins() -> None:
    session = StepSession("")
    get = wire.encode(wire.Get(b"/k"))
    session.whole = {get: wire.vec(b"whole")}
    async with serving(lambda peer, relay: session) as (server, port), connected(port) as client:
        (connection,) = server.connections
        client.writer.write(get)
        assert await client.take(13) == wire.vec(b"whole")
        assert session.handled == []
        # The same bytes as the value of a SET, in a segment of their own.
        put = wire.encode(wire.Set(b"/v", get))
        client.writer.write(put.removesuffix(get))
        await until(lambda: connection.held > 0)
        client.writer.write(get)
        await session.reached(1)
        assert session.handled == [wire.Set(b"/v", get)]
        # While that one is under way, a request is not answered before it.
        client.writer.write(get)
        await until(lambda: bool(connection._requests._pending))
        session.results[0].set_result(b"")
        await session.reached(2)
        assert session.handled[1:] == [wire.Get(b"/k")]
        session.results[1].set_result(wire.vec(b"later"))
        assert await client.take(13) == wire.vec(b"later")


async def test_what_was_answered_at_once_is_offered_to_be_kept() -> None:
    kept: list[tuple[bytes, Sequence[wire.Request]]] = []

    class KeepingSession(MemorySession):
        def keep(self, data: bytes, requests: Sequence[wire.Request]) -> None:
            kept.append((data, tuple(requests)))

    reads: list[wire.Request] = [wire.Wait((b"/k",)), wire.Get(b"/k")]
    both = b"".join(map(wire.encode, reads))
    async with storing(KeepingSession) as (store, port), connected(port) as client:
        store.put(b"/k", b"v")
        client.writer.write(both)
        assert await client.take(10) == wire.STOP_WAITING + wire.vec(b"v")
        assert kept == [(both, tuple(reads))]
        client.send(wire.Wait((b"/missing",)))
        client.writer.write(both)
        assert await client.take(10) == wire.STOP_WAITING + wire.vec(b"v")
        assert len(kept) == 1
