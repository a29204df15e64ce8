# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 without a socket: every frame, right and wrong, in every state of a stream."""

from __future__ import annotations

import pytest

from rdzv.store.http2.engine import (
    CONNECTION_WINDOW,
    MOST_UNTAKEN_ANSWERS,
    STREAM_WINDOW,
    Http2Engine,
)
from rdzv.store.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    MAX_FRAME_BYTES,
    MOST_CONTINUATIONS,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFaultError,
    ErrorCode,
    HeaderDecoder,
    frame,
    literal,
)
from tests.support.store.http2_peer import (
    GREETING,
    OK_FIELDS,
    OK_TRAILERS,
    Listening,
    Seen,
    block,
    data,
    goaway,
    headers,
    reset,
    sent,
    settings,
    trailers,
    window,
)

HEAD = literal(b":method", b"POST")
BODY = b"request"
MOST = (1 << 31) - 1


HEADER_BOMB = frame(
    HEADERS, END_HEADERS, 1, b"\x40" + literal(b"x", b"y" * 4000)[1:] + b"\xbe" * 10_000
)
"""A large field in the table, and then its index again and again: a byte each."""


class Client:
    """An engine whose connection is up, and what it heard."""

    def __init__(self, *more: tuple[int, int]) -> None:
        self.heard = Listening()
        self.engine = Http2Engine(self.heard)
        self.engine.feed(settings(*more))
        sent(self.engine)
        self.heard.seen.clear()

    def begin(self, body: bytes = BODY, *, ended: bool = True) -> int:
        return self.engine.begin(HEAD, body, ended=ended)

    def begun(self, body: bytes = BODY, *, ended: bool = True) -> int:
        """A stream whose request has gone."""
        stream_id = self.begin(body, ended=ended)
        sent(self.engine)
        return stream_id

    def hears(self, *frames: bytes) -> list[Seen]:
        self.heard.seen.clear()
        self.engine.feed(b"".join(frames))
        return self.heard.seen


@pytest.fixture
def client() -> Client:
    return Client()


# -- a connection


def test_a_connection_opens_with_preface_settings_and_a_window() -> None:
    engine = Http2Engine(Listening())
    out = engine.take()
    assert out.startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0")
    assert out.endswith((CONNECTION_WINDOW - 65535).to_bytes(4, "big"))
    assert engine.take() == b""


def test_settings_are_acknowledged_and_tell_once_that_the_server_is_there() -> None:
    heard = Listening()
    engine = Http2Engine(heard)
    engine.feed(GREETING + GREETING + frame(SETTINGS, ACK, 0, b""))
    assert heard.seen == [Seen("settled")]
    assert [(one.kind, one.flags) for one in sent(engine)] == [(SETTINGS, ACK)] * 2


@pytest.mark.parametrize(
    "first", [frame(PING, 0, 0, bytes(8)), b"HTTP/1.1 400 Bad Request\r\n\r\n"]
)
def test_what_does_not_begin_with_settings_is_no_http2(first: bytes) -> None:
    with pytest.raises(ConnectionFaultError, match="does not speak HTTP/2"):
        Http2Engine(Listening()).feed(first)


def test_a_ping_is_answered_with_its_own_bytes(client: Client) -> None:
    client.hears(frame(PING, 0, 0, b"12345678"), frame(PING, ACK, 0, bytes(8)))
    assert [(one.flags, one.payload) for one in sent(client.engine)] == [(ACK, b"12345678")]


def test_a_kind_of_frame_that_is_not_known_is_passed_over(client: Client) -> None:
    assert client.hears(frame(0x17, 0xFF, 5, b"whatever"), frame(PRIORITY, 0, 1, bytes(5))) == []


# -- what breaks the protocol


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 0, block()), ErrorCode.PROTOCOL_ERROR),
        (frame(PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (frame(PRIORITY, 0, 1, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 1, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (settings((2, 1)), ErrorCode.PROTOCOL_ERROR),
        (settings((4, MOST + 1)), ErrorCode.FLOW_CONTROL_ERROR),
        (settings((5, 16383)), ErrorCode.PROTOCOL_ERROR),
        (settings((5, 1 << 24)), ErrorCode.PROTOCOL_ERROR),
        (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (window(0, 0), ErrorCode.PROTOCOL_ERROR),
        (window(0, MOST), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(CONTINUATION, END_HEADERS, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (bytes((0, 0x40, 1)) + bytes((DATA, 0)) + bytes(4), ErrorCode.FRAME_SIZE_ERROR),
        (data(3, b"x"), ErrorCode.PROTOCOL_ERROR),
        (headers(3), ErrorCode.PROTOCOL_ERROR),
        (headers(2), ErrorCode.PROTOCOL_ERROR),
        (reset(3, 8), ErrorCode.PROTOCOL_ERROR),
        (window(3, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, PADDED, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
        (frame(DATA, PADDED, 1, b"\x02x"), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 1, block()[:-1]), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\x80"), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f"), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1, b"") + frame(0x17, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (
            frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, END_HEADERS, 3, b""),
            ErrorCode.PROTOCOL_ERROR,
        ),
        pytest.param(
            frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"") * (MOST_CONTINUATIONS + 1),
            ErrorCode.ENHANCE_YOUR_CALM,
            id="a header block without end",
        ),
        pytest.param(HEADER_BOMB, ErrorCode.COMPRESSION_ERROR, id="a header bomb"),
        pytest.param(
            frame(PING, 0, 0, bytes(8)) * (MOST_UNTAKEN_ANSWERS + 1),
            ErrorCode.ENHANCE_YOUR_CALM,
            id="much is asked, and no answer read",
        ),
    ],
)
def test_a_broken_protocol_ends_the_connection_with_its_reason(
    client: Client, bad: bytes, code: ErrorCode
) -> None:
    client.begun()
    with pytest.raises(ConnectionFaultError) as fault:
        client.engine.feed(bad)
    assert fault.value.code is code, str(fault.value)
    (last,) = sent(client.engine)[-1:]
    assert (last.kind, last.payload[4:]) == (GOAWAY, code.to_bytes(4, "big"))


# -- header blocks


def test_padding_priority_and_continuations_belong_to_no_field(client: Client) -> None:
    stream_id = client.begun()
    fields = block()
    first = bytes((3,)) + bytes(5) + fields[:4] + bytes(3)
    heard = client.hears(
        frame(HEADERS, PADDED | HAS_PRIORITY | END_STREAM, stream_id, first),
        frame(CONTINUATION, 0, stream_id, fields[4:9]),
        frame(CONTINUATION, END_HEADERS, stream_id, fields[9:]),
    )
    assert heard == [Seen("headers", stream_id, (OK_FIELDS, True))]


def test_headers_of_a_stream_that_has_ended_still_count_for_the_table(client: Client) -> None:
    ended, other = client.begun(), client.begun()
    client.engine.cancel(ended)
    indexed = b"\x40" + literal(b"grpc-status", b"0")[1:]
    heard = client.hears(
        frame(HEADERS, END_HEADERS, ended, indexed),
        frame(HEADERS, END_HEADERS | END_STREAM, other, b"\xbe"),
    )
    assert heard == [Seen("headers", other, (OK_TRAILERS, True))]


def test_a_request_keeps_no_table() -> None:
    client = Client((1, 0))
    client.begin()
    (head, _) = sent(client.engine)
    assert head.payload == b"\x20" + HEAD


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 383, 20_000])
def test_a_literal_of_any_length_is_read_as_it_was_written(size: int) -> None:
    for secret in (False, True):
        written = literal(b"n" * max(size, 1), b"v" * size, secret=secret)
        assert HeaderDecoder().decode(written) == ((b"n" * max(size, 1), b"v" * size),)


def test_a_block_larger_than_a_frame_goes_on_in_continuations(client: Client) -> None:
    client.engine.begin(literal(b"x", b"y" * 40_000), BODY, ended=True)
    out = sent(client.engine)
    assert [one.kind for one in out] == [HEADERS, CONTINUATION, CONTINUATION, DATA]
    assert [one.flags for one in out] == [0, 0, END_HEADERS, END_STREAM]


def test_an_answer_that_says_wait_is_none(client: Client) -> None:
    stream_id = client.begun()
    assert client.hears(headers(stream_id, ((b":status", b"103"),))) == []
    assert client.hears(headers(stream_id)) == [Seen("headers", stream_id, (OK_FIELDS, False))]


# -- streams


def test_a_connection_whose_ids_are_used_up_takes_no_more(client: Client) -> None:
    client.engine._last_id = MOST - 2
    assert not client.engine.draining
    assert client.begin() == MOST
    assert client.engine.draining


def test_a_reset_breaks_the_stream_and_nothing_else(client: Client) -> None:
    one, other = client.begun(), client.begun()
    assert client.hears(reset(one, ErrorCode.CANCEL)) == [Seen("broken", one, ErrorCode.CANCEL)]
    assert client.hears(headers(one), data(one, b"late"), reset(one, 2), window(one, 5)) == []
    assert client.hears(trailers(other)) == [Seen("headers", other, (OK_TRAILERS, True))]


def test_a_second_goaway_may_refuse_more(client: Client) -> None:
    one, other = client.begun(), client.begun()
    assert client.hears(goaway(MOST)) == []
    assert client.hears(goaway(one)) == [Seen("refused", other)]


@pytest.mark.parametrize(
    "bad",
    [
        lambda one: data(one, b"before headers"),
        lambda one: headers(one) + headers(one),
        lambda one: window(one, 0),
        lambda one: window(one, MOST),
    ],
    ids=["data first", "headers in the middle", "no window", "window too large"],
)
def test_what_breaks_one_stream_leaves_the_others(client: Client, bad: object) -> None:
    assert callable(bad)
    one, other = client.begun(), client.begun()
    heard = client.hears(bad(one))
    assert heard[-1][:2] == ("broken", one)
    assert [frame.kind for frame in sent(client.engine)] == [RST_STREAM]
    assert client.hears(trailers(other))[0].what == "headers"


def test_a_request_that_is_answered_before_it_was_sent_in_full_is_given_up() -> None:
    client = Client((4, 4))
    stream_id = client.begun(b"more than the window")
    assert client.hears(trailers(stream_id))[0].what == "headers"
    assert [frame.kind for frame in sent(client.engine)] == [RST_STREAM]
    assert client.hears(window(stream_id, 100)) == []
    assert sent(client.engine) == []


# -- flow control


def test_the_window_of_the_connection_is_shared(client: Client) -> None:
    one = client.begun(bytes(65535 - 4))
    other = client.begin(b"01234567")
    assert [frame.payload for frame in sent(client.engine)[1:]] == [b"0123"]
    client.hears(window(0, 3), window(one, 100))
    assert [frame.payload for frame in sent(client.engine)] == [b"456"]
    client.hears(window(0, 3))
    assert [frame.payload for frame in sent(client.engine)] == [b"7"]
    assert client.hears(trailers(other))[0].what == "headers"
    assert sent(client.engine) == []


def test_a_large_request_goes_in_frames_that_the_server_takes(client: Client) -> None:
    client.begin(bytes(40_000))
    sizes = [len(one.payload) for one in sent(client.engine)[1:]]
    assert sizes == [MAX_FRAME_BYTES, MAX_FRAME_BYTES, 40_000 - 2 * MAX_FRAME_BYTES]


def test_more_data_than_was_allowed_resets_the_stream(client: Client) -> None:
    stream_id = client.begun(ended=False)
    client.hears(headers(stream_id))
    part = bytes(MAX_FRAME_BYTES)
    for _ in range(STREAM_WINDOW // len(part)):
        client.hears(data(stream_id, part))
    heard = client.hears(data(stream_id, b"x"))
    assert heard == [Seen("broken", stream_id, ErrorCode.FLOW_CONTROL_ERROR)]


def test_what_comes_for_streams_that_have_ended_is_given_back_to_the_connection(
    client: Client,
) -> None:
    stream_id = client.begun()
    client.engine.cancel(stream_id)
    part = bytes(MAX_FRAME_BYTES)
    for _ in range(2 * CONNECTION_WINDOW // len(part)):
        client.engine.feed(data(stream_id, part))
    assert sum(int.from_bytes(one.payload, "big") for one in sent(client.engine)[1:]) >= (
        CONNECTION_WINDOW
    )


def test_padding_counts_for_the_windows(client: Client) -> None:
    stream_id = client.begun()
    client.hears(headers(stream_id))
    padded = frame(DATA, PADDED, stream_id, bytes((9,)) + b"answer" + bytes(9))
    assert client.hears(padded) == [Seen("data", stream_id, (b"answer", 16, False))]


# -- what has certainly not been sent


def test_what_was_not_taken_was_not_sent_and_leaves_no_trace(client: Client) -> None:
    kept, withdrawn = client.begin(b"kept"), client.begin(b"withdrawn")
    assert client.engine.unsent(withdrawn)
    assert client.engine.cancel(withdrawn)
    assert [(one.kind, one.stream_id) for one in sent(client.engine)] == [
        (HEADERS, kept),
        (DATA, kept),
    ]
    assert not client.engine.unsent(kept)
    assert client.engine._room == 65535 - len(b"kept")


def test_the_room_of_what_was_withdrawn_is_for_others(client: Client) -> None:
    first, second = client.begin(bytes(65535)), client.begin(b"second")
    sizes = [len(one.payload) for one in sent(client.engine) if one.kind == DATA]
    assert sum(sizes) == 65535
    client.hears(window(0, 3))
    assert client.engine.cancel(second)
    third = client.begin(b"abc")
    assert [one.payload for one in sent(client.engine) if one.stream_id == third][1:] == [b"abc"]
    assert not client.engine.unsent(first)


def test_a_day_of_calls_leaves_nothing_behind(client: Client) -> None:
    for _ in range(20_000):
        stream_id = client.begun()
        answer = headers(stream_id) + data(stream_id, b"answer") + trailers(stream_id)
        client.hears(answer + window(0, len(BODY)))
    engine = client.engine
    assert (engine._streams, engine._blocked, engine._chunks, engine._owners) == ({}, {}, [], [])
