# SPDX-License-Identifier: Apache-2.0
"""The embedded store's side of a connection of gRPC, whose client is played frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rdzv.store.etcd.errors import StatusCode
from rdzv.store.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    MOST_WINDOW,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    FrameReader,
    IncomingFrame,
    frame,
)
from rdzv.store.http2.header_blocks import MOST_CONTINUATIONS, HeaderDecoder
from rdzv.store.http2.messages import framed
from rdzv.store.memory.served_connection import (
    MAX_REQUEST_BYTES,
    UNREAD_BYTES,
    UNSENT_BYTES,
    WINDOW,
    ServedCall,
    ServedConnection,
)
from tests.support.store.http2_peer import block, data, goaway, headers, reset, settings, window

LARGE = bytes(range(256)) * 1000


class Wire(asyncio.Transport):
    """The client's end, which reads all or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = FrameReader()
        self.frames: list[IncomingFrame] = []
        self.writes = self.unread = 0
        self.closing = self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing
        self.writes += 1
        self.frames += self.reader.read(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True


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


class Client:
    """A client that is connected, and what it was answered."""

    def __init__(
        self, made: Callable[[bytes], bytes] = bytes.upper, *, greets: bool = True
    ) -> None:
        self.echoes: list[Echo] = []

        def serve(call: ServedCall) -> Echo:
            self.echoes.append(Echo(call, made))
            return self.echoes[-1]

        self.wire = Wire()
        self.connections: set[ServedConnection] = set()
        self.connection = ServedConnection({b"/echo": serve}, self.connections)
        self.connection.connection_made(self.wire)
        self.decoder = HeaderDecoder()
        if greets:
            self.say(PREFACE, settings())
            self.wire.frames.clear()

    def say(self, *frames: bytes) -> None:
        self.connection.data_received(b"".join(frames))

    def ask(self, stream_id: int, message: bytes = b"hello", path: bytes = b"/echo") -> None:
        self.say(
            headers(stream_id, ((b":path", path),)), data(stream_id, framed(message), ended=True)
        )

    def of(self, kind: int) -> list[IncomingFrame]:
        return [one for one in self.wire.frames if one.kind == kind]

    def fields(self) -> list[dict[bytes, bytes]]:
        return [dict(self.decoder.decode(one.payload)) for one in self.of(HEADERS)]

    def answer(self) -> bytes:
        return b"".join(one.payload for one in self.of(DATA))


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
    words = headers(1, ((b":path", b"/echo"),)), data(1, framed(b"hello"), ended=True)
    for byte in b"".join((PREFACE, settings(), *words)):
        client.say(bytes((byte,)))
    assert client.answer() == framed(b"HELLO")


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/1.1\r\n",
        b"X" * len(PREFACE),
        PREFACE + data(1, b""),
    ],
)
async def test_what_is_no_client_of_http2_is_sent_away(first: bytes) -> None:
    client = Client(greets=False)
    # What comes in the same piece is not carried out either.
    client.say(first, settings(), headers(1, ((b":path", b"/echo"),)))
    assert client.wire.closing
    client.ask(3)
    assert client.echoes == []


async def test_an_unknown_call_is_named() -> None:
    client = Client()
    client.ask(1, path=b"/etcdserverpb.Lock/Lock")
    (fields,) = client.fields()
    assert fields[b"grpc-status"] == b"%d" % StatusCode.UNIMPLEMENTED.value
    assert b"/etcdserverpb.Lock/Lock" in fields[b"grpc-message"]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"\0" + (MAX_REQUEST_BYTES + 1).to_bytes(4, "big"), StatusCode.INVALID_ARGUMENT),
        (b"\1" + bytes(4), StatusCode.INVALID_ARGUMENT),
    ],
    ids=["too large", "compressed"],
)
async def test_a_request_that_cannot_be_taken_is_refused(message: bytes, code: StatusCode) -> None:
    client = Client()
    client.say(headers(1, ((b":path", b"/echo"),)), data(1, message))
    (fields,) = client.fields()
    assert fields[b"grpc-status"] == b"%d" % code.value
    # The rest of the request need not come any more.
    assert [one.stream_id for one in client.of(RST_STREAM)] == [1]
    client.say(data(1, b"more", ended=True))
    assert not client.wire.closing


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
    assert client.of(DATA)[-1].payload == framed(b"small")
    client.say(settings((4, 150_000)))
    client.say(window(1, 1_000_000))
    parts = [one.payload for one in client.of(DATA) if one.stream_id == 1]
    assert b"".join(parts) == framed(LARGE)
    assert max(map(len, parts)) == 16384
    assert [one.stream_id for one in client.of(HEADERS)] == [1, 3, 3, 1]


async def test_a_service_waits_for_a_client_that_does_not_read() -> None:
    client = Client()
    client.say(headers(1, ((b":path", b"/echo"),)))
    (echo,) = client.echoes
    writing = asyncio.create_task(echo.call.write(bytes(65535 + UNSENT_BYTES)))
    await asyncio.sleep(0)
    assert not writing.done()
    client.say(window(0, 1000), window(1, 1000))
    await asyncio.sleep(0)
    assert writing.done()


async def test_what_the_client_has_sent_is_given_back_to_it() -> None:
    client = Client()
    client.say(headers(1, ((b":path", b"/echo"),)))
    piece = framed(bytes(16000))
    for _ in range(WINDOW // 4 // len(piece) + 1):
        client.say(data(1, piece))
    given = {one.stream_id: one for one in client.of(WINDOW_UPDATE)}
    assert given.keys() == {0, 1}
    assert int.from_bytes(given[1].payload, "big") >= WINDOW // 4


@pytest.mark.parametrize("how", ["reset", "lost"])
async def test_a_call_that_the_client_leaves_is_closed(how: str) -> None:
    client = Client()
    client.say(headers(1, ((b":path", b"/echo"),)))
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
    assert client.of(GOAWAY)


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
        (headers(4, ((b":path", b"/echo"),)), ErrorCode.PROTOCOL_ERROR),
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
    client.say(headers(1, ((b":path", b"/echo"),)))
    client.say(bad)
    assert [one.payload[4:] for one in client.of(GOAWAY)] == [code.to_bytes(4, "big")]
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
    client.say(headers(1, ((b":path", b"/echo"),)), data(1, framed(b"held back")))
    client.say(bad)
    (last,) = client.of(RST_STREAM)
    assert (last.stream_id, last.payload) == (1, code.to_bytes(4, "big"))
    assert client.echoes[0].closed == 1
    client.say(settings((4, 65535)))
    client.ask(3)
    assert client.of(DATA)[-1].payload == framed(b"HELLO")
    assert [one.stream_id for one in client.of(HEADERS)][-2:] == [3, 3]


async def test_the_end_of_the_server_says_which_calls_it_has_not_seen() -> None:
    client = Client()
    client.ask(5)
    client.connection.end()
    (last,) = client.of(GOAWAY)
    assert last.payload == goaway(5)[9:]
    assert client.wire.closing


async def test_a_client_that_reads_nothing_is_left() -> None:
    client = Client()
    client.say(frame(PING, 0, 0, b"12345678"))
    assert [(one.flags, one.payload) for one in client.of(PING)] == [(ACK, b"12345678")]
    client.say(settings())
    assert [one.flags for one in client.of(SETTINGS)] == [ACK]
    client.wire.unread = UNREAD_BYTES + 1
    client.say(frame(PING, 0, 0, b"12345678"))
    assert client.wire.aborted
