# SPDX-License-Identifier: Apache-2.0
"""The embedded store's side of a connection of gRPC, whose client is played frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rdzv.store import etcd_pb2 as pb
from rdzv.store.etcd.answers import StatusCode
from rdzv.store.http2.calls import framed
from rdzv.store.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    MOST_CONTINUATIONS,
    MOST_WINDOW,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    ErrorCode,
    frame,
)
from rdzv.store.memory import served_connection
from rdzv.store.memory.actions import Write
from rdzv.store.memory.engine import MemoryEngine
from rdzv.store.memory.served_connection import (
    MAX_REQUEST_BYTES,
    MOST_CALLS,
    UNREAD_BYTES,
    UNSENT_BYTES,
    WINDOW,
    ServedCall,
    ServedConnection,
    Services,
)
from rdzv.store.memory.server import ServedWatch
from tests.support.store.http2_peer import (
    Wire,
    block,
    data,
    goaway,
    headers,
    reset,
    settings,
    window,
)

LARGE = bytes(range(256)) * 1000


class Echo:
    """Answers each request with what ``made`` makes of it."""

    def __init__(self, call: ServedCall, made: Callable[[bytes], bytes]) -> None:
        self.call, self.made = call, made
        self.ended = self.closed = 0

    def take(self, message: bytes) -> None:
        self.call.send(self.made(message))

    def end(self) -> None:
        self.ended += 1
        self.call.finish(StatusCode.OK)

    def close(self) -> None:
        self.closed += 1


def opened(stream_id: int, path: bytes = b"/echo") -> bytes:
    """The beginning of a call."""
    return headers(stream_id, ((b":path", path),))


class Client:
    """A client that is connected, and what it was answered."""

    def __init__(
        self,
        made: Callable[[bytes], bytes] = bytes.upper,
        *,
        greets: bool = True,
        services: Services | None = None,
    ) -> None:
        self.echoes: list[Echo] = []

        def serve(call: ServedCall) -> Echo:
            self.echoes.append(Echo(call, made))
            return self.echoes[-1]

        self.wire = Wire()
        self.connections: set[ServedConnection] = set()
        self.connection = ServedConnection(services or {b"/echo": serve}, self.connections)
        self.connection.connection_made(self.wire)
        if greets:
            self.say(PREFACE, settings())
            self.wire.frames.clear()

    def say(self, *frames: bytes) -> None:
        self.connection.data_received(b"".join(frames))

    def ask(self, stream_id: int, message: bytes = b"hello", path: bytes = b"/echo") -> None:
        self.say(opened(stream_id, path), data(stream_id, framed(message), ended=True))

    def fields(self) -> list[dict[bytes, bytes]]:
        return [dict(self.wire.decoder.decode(one.payload)) for one in self.wire.of(HEADERS)]

    def answer(self) -> bytes:
        return b"".join(one.payload for one in self.wire.of(DATA))


async def test_a_call_is_answered_in_one_piece() -> None:
    client = Client()
    client.wire.writes = 0
    client.ask(1)
    client.ask(3, b"again")
    assert client.wire.writes == 2
    assert [one.kind for one in client.wire.frames] == [HEADERS, DATA, HEADERS] * 2
    assert client.answer() == framed(b"HELLO") + framed(b"AGAIN")
    first, last = client.fields()[:2]
    assert first == {b":status": b"200", b"content-type": b"application/grpc"}
    assert last == {b"grpc-status": b"0", b"grpc-message": b""}
    assert [(one.ended, one.closed) for one in client.echoes] == [(1, 1), (1, 1)]


async def test_it_comes_byte_by_byte() -> None:
    client = Client(greets=False)
    words = PREFACE, settings(), opened(1), data(1, framed(b"hello"), ended=True)
    for byte in b"".join(words):
        client.say(bytes((byte,)))
    assert client.answer() == framed(b"HELLO")


@pytest.mark.parametrize(
    "first",
    [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/1.1\r\n", b"X" * len(PREFACE), PREFACE + data(1, b"")],
)
async def test_what_is_no_client_of_http2_is_sent_away(first: bytes) -> None:
    client = Client(greets=False)
    # What comes in the same piece is not carried out either.
    client.say(first, settings(), opened(1))
    assert client.wire.closing
    client.ask(3)
    assert client.echoes == []


async def test_an_unknown_call_is_named() -> None:
    client = Client()
    client.ask(1, path=b"/etcdserverpb.Lock/Lock")
    (fields,) = client.fields()
    assert fields[b"grpc-status"] == b"%d" % StatusCode.UNIMPLEMENTED.value
    assert b"/etcdserverpb.Lock/Lock" in fields[b"grpc-message"]


TOO_LARGE = b"\0" + (MAX_REQUEST_BYTES + 1).to_bytes(4, "big")
COMPRESSED = b"\1" + bytes(4)


@pytest.mark.parametrize("message", [TOO_LARGE, COMPRESSED], ids=["too large", "compressed"])
@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_malformed_message_ends_its_call_after_those_before_it(
    message: bytes, pieces: int
) -> None:
    client = Client()
    asked = framed(b"a") + framed(b"b"), message
    client.say(
        opened(1), *(data(1, part) for part in (asked if pieces == 2 else [b"".join(asked)]))
    )
    assert client.answer() == framed(b"A") + framed(b"B")
    assert client.fields()[-1][b"grpc-status"] == b"%d" % StatusCode.INVALID_ARGUMENT.value
    # The rest of the request need not come any more.
    assert [one.stream_id for one in client.wire.of(RST_STREAM)] == [1]
    client.say(data(1, b"more", ended=True))
    assert not client.wire.closing


async def test_nothing_is_kept_of_what_follows_a_malformed_message() -> None:
    client = Client()
    client.say(settings((4, 0)), opened(1), data(1, framed(b"answered")))
    client.say(data(1, framed(b"\1") + b"\1"))
    for _ in range(10):
        client.say(data(1, b"\1" * 16000))
    (echo,) = client.echoes
    assert not echo.call.reader.partial
    client.say(window(1, 65535))
    assert client.fields()[-1][b"grpc-status"] == b"%d" % StatusCode.INVALID_ARGUMENT.value


async def test_a_defect_ends_its_own_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    def broken(message: bytes) -> bytes:
        if message == b"odd":
            raise KeyError("planted é")
        return message

    client = Client(broken)
    client.ask(1, b"odd")
    client.ask(3, b"even")
    assert client.fields()[0][b"grpc-status"] == b"%d" % StatusCode.UNKNOWN.value
    assert client.fields()[0][b"grpc-message"] == b"KeyError('planted %C3%A9')"
    assert client.answer() == framed(b"even")
    assert "a call failed in the embedded store" in caplog.text


async def test_a_large_answer_waits_for_the_windows_and_holds_no_other_up() -> None:
    client = Client(lambda message: LARGE if message == b"large" else message)
    client.say(settings((4, 100_000)))
    client.wire.frames.clear()
    client.ask(1, b"large")
    assert len(client.answer()) == 65535
    client.say(window(0, 1_000_000))
    assert len(client.answer()) == 100_000
    client.ask(3, b"small")
    assert client.wire.of(DATA)[-1].payload == framed(b"small")
    client.say(settings((4, 150_000)))
    client.say(window(1, 1_000_000))
    parts = [one.payload for one in client.wire.of(DATA) if one.stream_id == 1]
    assert b"".join(parts) == framed(LARGE)
    assert max(map(len, parts)) == 16384
    assert [one.stream_id for one in client.wire.of(HEADERS)] == [1, 3, 3, 1]


@pytest.mark.parametrize("full", ["window", "socket"])
async def test_a_service_waits_for_a_client_that_does_not_read(full: str) -> None:
    client = Client()
    client.say(opened(1))
    (echo,) = client.echoes
    if full == "socket":
        client.say(settings((4, MOST_WINDOW)), window(0, MOST_WINDOW - 65535))
        client.connection.pause_writing()
    writing = asyncio.create_task(echo.call.write(bytes(65535 + UNSENT_BYTES)))
    await asyncio.sleep(0)
    assert not writing.done()
    if full == "socket":
        assert client.answer() == b""
        client.connection.resume_writing()
    else:
        client.say(window(0, 1000), window(1, 1000))
    await asyncio.sleep(0)
    assert writing.done()


async def test_what_the_client_has_sent_is_given_back_to_it() -> None:
    client = Client()
    client.say(opened(1))
    piece = framed(bytes(16000))
    for _ in range(WINDOW // 4 // len(piece) + 1):
        client.say(data(1, piece))
    assert client.wire.given_back(0)
    assert client.wire.given_back(1) >= WINDOW // 4


@pytest.mark.parametrize("how", ["reset", "lost"])
async def test_a_call_that_the_client_leaves_is_closed(how: str) -> None:
    client = Client()
    client.say(opened(1))
    if how == "reset":
        client.say(reset(1, 8))
    else:
        client.connection.connection_lost(None)
        assert client.connections == set()
    assert [(one.ended, one.closed) for one in client.echoes] == [(0, 1)]


async def test_a_header_block_comes_in_parts_and_must_end() -> None:
    client = Client()
    whole = block(((b":path", b"/echo"),))
    client.say(frame(HEADERS, 0, 1, whole[:3]), frame(CONTINUATION, END_HEADERS, 1, whole[3:]))
    client.say(data(1, framed(b"hello"), ended=True))
    assert client.answer() == framed(b"HELLO")
    client.say(frame(HEADERS, 0, 3, whole), *[frame(CONTINUATION, 0, 3, bytes(16000))] * 5)
    assert client.wire.closing
    assert client.wire.of(GOAWAY)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (settings((5, 0)), ErrorCode.PROTOCOL_ERROR),
        (settings((5, 1 << 31)), ErrorCode.PROTOCOL_ERROR),
        (settings((4, MOST_WINDOW + 1)), ErrorCode.FLOW_CONTROL_ERROR),
        (window(1, 65536) + settings((4, MOST_WINDOW)), ErrorCode.FLOW_CONTROL_ERROR),
        (window(0, MOST_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
        (window(0, 0), ErrorCode.PROTOCOL_ERROR),
        (window(3, 1), ErrorCode.PROTOCOL_ERROR),
        (data(3, b""), ErrorCode.PROTOCOL_ERROR),
        (reset(2, 8), ErrorCode.PROTOCOL_ERROR),
        (opened(4), ErrorCode.PROTOCOL_ERROR),
        (frame(CONTINUATION, END_HEADERS, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, 0, 3, b"") + data(3, b""), ErrorCode.PROTOCOL_ERROR),
        (
            frame(HEADERS, 0, 3, b"") + frame(CONTINUATION, 0, 3, b"") * MOST_CONTINUATIONS,
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
    ],
)
async def test_a_broken_protocol_ends_the_connection_with_its_reason(
    bad: bytes, code: ErrorCode
) -> None:
    client = Client()
    client.say(opened(1))
    client.say(bad)
    assert [one.payload[4:] for one in client.wire.of(GOAWAY)] == [code.to_bytes(4, "big")]
    assert client.wire.closing
    assert len(client.echoes) == 1


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (window(1, 0), ErrorCode.PROTOCOL_ERROR),
        (window(1, MOST_WINDOW) * 2, ErrorCode.FLOW_CONTROL_ERROR),
        (data(1, b"", ended=True) + data(1, b""), ErrorCode.STREAM_CLOSED),
    ],
)
async def test_a_protocol_broken_on_a_stream_ends_its_call_alone(
    bad: bytes, code: ErrorCode
) -> None:
    client = Client()
    client.say(settings((4, 0)))
    client.say(opened(1), data(1, framed(b"held back")))
    client.say(bad)
    (last,) = client.wire.of(RST_STREAM)
    assert (last.stream_id, last.payload) == (1, code.to_bytes(4, "big"))
    assert client.echoes[0].closed == 1
    client.say(settings((4, 65535)))
    client.ask(3)
    assert client.wire.of(DATA)[-1].payload == framed(b"HELLO")
    assert [one.stream_id for one in client.wire.of(HEADERS)][-2:] == [3, 3]


async def test_the_end_of_the_server_says_which_calls_it_has_not_seen() -> None:
    client = Client()
    client.ask(5)
    client.connection.end()
    (last,) = client.wire.of(GOAWAY)
    assert last.payload == goaway(5)[9:]
    assert client.wire.closing


async def test_a_client_that_reads_nothing_is_left() -> None:
    client = Client()
    client.say(frame(PING, 0, 0, b"12345678"))
    assert [(one.flags, one.payload) for one in client.wire.of(PING)] == [(ACK, b"12345678")]
    client.say(settings())
    assert [one.flags for one in client.wire.of(SETTINGS)] == [ACK]
    client.wire.unread = UNREAD_BYTES + 1
    client.say(frame(PING, 0, 0, b"12345678"))
    assert client.wire.aborted


async def test_no_answer_is_put_in_front_of_a_socket_that_takes_no_more() -> None:
    client = Client(lambda message: LARGE)
    client.say(settings((4, MOST_WINDOW)), window(0, MOST_WINDOW - 65535))
    client.wire.on_write = client.connection.pause_writing
    client.say(opened(1), data(1, framed(b"") * 100, ended=True))
    assert len(client.answer()) < 2 * UNSENT_BYTES
    client.wire.on_write = lambda: None
    client.connection.resume_writing()
    assert client.answer() == framed(LARGE) * 100
    assert client.echoes[0].closed == 1


async def test_a_call_too_many_is_refused_and_costs_no_other() -> None:
    client = Client(greets=False)
    client.say(PREFACE, settings())
    assert (3).to_bytes(2, "big") + MOST_CALLS.to_bytes(4, "big") in client.wire.of(SETTINGS)[
        0
    ].payload
    path = ((b":path", b"/echo"),)
    last = 2 * MOST_CALLS + 1
    client.say(*(headers(stream_id, path) for stream_id in range(1, last, 2)))
    # Its headers change the table all the same.
    client.say(frame(HEADERS, END_HEADERS, last, b"\x40" + block(path)[1:]))
    (refused,) = client.wire.of(RST_STREAM)
    assert refused.stream_id == last
    assert refused.payload == ErrorCode.REFUSED_STREAM.to_bytes(4, "big")
    assert len(client.echoes) == MOST_CALLS
    client.say(data(last, framed(b"of the refused")), reset(1, 8))
    client.say(frame(HEADERS, END_HEADERS, last + 2, b"\xbe"))
    client.say(data(last + 2, framed(b"hello"), ended=True))
    assert client.answer() == framed(b"HELLO")
    assert client.wire.of(RST_STREAM) == [refused]


@pytest.mark.parametrize("calls", [1, 50])
async def test_a_client_that_asks_for_more_than_it_reads_is_left(
    calls: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served_connection, "UNREAD_BYTES", 10 * len(LARGE))
    made: list[bytes] = []

    def large(message: bytes) -> bytes:
        made.append(message)
        return LARGE

    client = Client(large)
    asked = [
        opened(stream_id) + data(stream_id, framed(b"") * (50 // calls))
        for stream_id in range(1, 2 * calls, 2)
    ]
    client.say(settings((4, 0)), *asked)
    assert client.wire.aborted
    # The rest of what came in the same piece is not carried out.
    assert len(made) == 11
    assert all(echo.closed == 1 for echo in client.echoes)
    assert client.connections == set()
    assert "read too little" in caplog.text


async def test_one_answer_may_be_larger_than_what_a_client_may_leave_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_connection, "UNREAD_BYTES", len(LARGE) // 2)
    client = Client(lambda message: LARGE)
    client.ask(1)
    client.say(window(0, len(LARGE)), window(1, len(LARGE)))
    assert client.answer() == framed(LARGE)
    # What was read counts no more, nor does what a client has given up.
    client.say(settings((4, 0)))
    for stream_id in (3, 5, 7):
        client.ask(stream_id)
        client.say(reset(stream_id, 8))
    assert not client.wire.closing


async def test_a_defect_ends_a_watch_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = MemoryEngine()
    sound = True

    def header() -> pb.ResponseHeader:
        if not sound:
            raise KeyError("planted")
        return pb.ResponseHeader()

    client = Client(services={b"/watch": lambda call: ServedWatch(call, engine, header)})
    create = pb.WatchRequest(create_request=pb.WatchCreateRequest(key=b"/a"))
    client.say(opened(1, b"/watch"), data(1, framed(create.SerializeToString())))
    for _ in range(3):
        await asyncio.sleep(0)
    assert pb.WatchResponse.FromString(client.answer()[5:]).created
    sound = False
    engine.txn([], [Write(b"/a", b"1", 0)], [])
    for _ in range(3):
        await asyncio.sleep(0)
    last = client.fields()[-1]
    assert last[b"grpc-status"] == b"%d" % StatusCode.UNKNOWN.value
    assert last[b"grpc-message"] == b"KeyError('planted')"
    assert "a watch failed in the embedded store" in caplog.text
