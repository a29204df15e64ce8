# SPDX-License-Identifier: Apache-2.0
"""Calls of gRPC on one connection, whose other end is played; in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.store.http2.calls import DEADLINE_EXCEEDED, INTERNAL, UNKNOWN, CallFailedError, framed
from rdzv.store.http2.connection import PING_AFTER_S, PING_ANSWER_S, Http2Connection
from rdzv.store.http2.engine import STREAM_WINDOW
from rdzv.store.http2.frames import (
    ACK,
    DATA,
    GOAWAY,
    HEADERS,
    MAX_FRAME_BYTES,
    PING,
    RST_STREAM,
    ErrorCode,
    Fields,
    frame,
)
from tests.support.store.http2_peer import (
    Played,
    Wire,
    data,
    goaway,
    headers,
    reset,
    trailers,
    window,
)

pytestmark = pytest.mark.virtual

PATH = "/store/Call"


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def calling(
    connection: Played, message: bytes = b"request", timeout_s: float = 1.0
) -> asyncio.Task[bytes]:
    """A call that waits for its answer."""
    task = asyncio.create_task(connection.unary(PATH, message, timeout_s, (("token", "t"),)))
    await turns()
    return task


async def failure(task: asyncio.Task[bytes]) -> CallFailedError:
    with pytest.raises(CallFailedError) as failed:
        await task
    return failed.value


async def test_a_call_says_what_grpc_wants_to_hear() -> None:
    connection = Played()
    task = await calling(connection, timeout_s=1.5)
    assert connection.wire.fields() == {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": PATH.encode(),
        b":authority": b"store:2379",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        b"user-agent": b"muster",
        b"token": b"t",
        b"grpc-timeout": b"1500m",
    }
    assert [one.payload for one in connection.wire.of(DATA)] == [framed(b"request")]
    connection.answer(1)
    assert await task == b"answer"
    assert connection._calls == {}


async def test_calls_are_answered_in_any_order_and_pieces() -> None:
    connection = Played()
    one, other = await calling(connection), await calling(connection)
    connection.hear(headers(3), headers(1))
    whole = framed(b"of the other")
    for at in range(len(whole)):
        connection.hear(data(3, whole[at : at + 1]))
    connection.hear(data(1, framed(b"of one")), trailers(3), trailers(1))
    assert [await one, await other] == [b"of one", b"of the other"]


STATUS_CASES: list[tuple[Fields, int, str]] = [
    (((b"grpc-status", b"14"), (b"grpc-message", b"etcdserver: no leader")), 14, "no leader"),
    (((b"grpc-status", b"9"), (b"grpc-message", b"100%25 caf%C3%A9 %zz")), 9, "100% café %zz"),
    (((b":status", b"200"), (b"grpc-status", b"7")), 7, ""),
    (((b":status", b"404"), (b"content-type", b"text/html")), 12, "HTTP status 404"),
    (((b":status", b"503"),), 14, "HTTP status 503"),
    (((b"grpc-status", b"what"),), UNKNOWN, ""),
    (((b"grpc-status", b"17"),), UNKNOWN, ""),
    (((b"x", b"y"),), UNKNOWN, "without a status"),
]


@pytest.mark.parametrize(("fields", "code", "said"), STATUS_CASES)
@pytest.mark.parametrize("in_trailers", [False, True])
async def test_a_status_is_the_server_s(
    fields: Fields, code: int, said: str, in_trailers: bool
) -> None:
    connection = Played()
    task = await calling(connection)
    connection.hear(*((headers(1),) if in_trailers else ()), trailers(1, fields))
    failed = await failure(task)
    assert (failed.code, failed.sent) == (code, True)
    assert said in str(failed)


@pytest.mark.parametrize(
    "answer",
    [
        b"\1" + framed(b"compressed")[1:],
        b"\0\xff\xff\xff\xff",
        framed(b"one") + framed(b"two"),
        framed(b"cut short")[:-1],
        b"",
    ],
    ids=["compressed", "too large", "two", "cut short", "none"],
)
async def test_what_is_no_answer_leaves_the_request_ambiguous(answer: bytes) -> None:
    connection = Played()
    task, other = await calling(connection), await calling(connection)
    connection.hear(headers(1), data(1, answer), trailers(1))
    failed = await failure(task)
    assert (failed.code, failed.sent) == (INTERNAL, True)
    connection.answer(3)
    assert await other == b"answer"


# -- deadlines


@pytest.mark.parametrize(
    ("limits", "jammed", "sent", "frames"),
    [
        pytest.param((), False, True, [HEADERS, DATA, RST_STREAM], id="not answered"),
        pytest.param((), True, False, [], id="never left"),
        pytest.param(((4, 8),), False, False, [HEADERS, DATA, RST_STREAM], id="left but a byte"),
    ],
)
async def test_a_call_that_is_late_says_whether_it_may_have_been_carried_out(
    limits: tuple[tuple[int, int], ...], jammed: bool, sent: bool, frames: list[int]
) -> None:
    connection = Played(*limits)
    if jammed:
        connection.jam()
    failed = await failure(await calling(connection))
    assert (failed.code, failed.sent) == (DEADLINE_EXCEEDED, sent)
    connection.resume_writing()
    assert [one.kind for one in connection.wire.frames] == frames
    for one in connection.wire.of(RST_STREAM):
        assert one.payload == ErrorCode.CANCEL.to_bytes(4, "big")
    connection.answer(1)
    assert connection.usable


async def test_the_server_s_own_end_of_the_deadline_is_one() -> None:
    loop = asyncio.get_running_loop()
    connection = Played()
    task = await calling(connection, timeout_s=1.0)
    (call,) = connection._calls.values()
    loop.call_at(loop.time() + 1.0, call.broken, ErrorCode.CANCEL)
    failed = await failure(task)
    assert (failed.code, failed.sent) == (DEADLINE_EXCEEDED, True)


async def test_a_caller_that_goes_away_ends_its_call() -> None:
    connection = Played()
    task = await calling(connection)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(connection.wire.of(RST_STREAM)) == 1
    assert connection._calls == {}


@pytest.mark.parametrize("first", ["the caller goes", "the call ends"])
async def test_a_caller_may_go_away_in_the_turn_in_which_its_call_ends(first: str) -> None:
    connection = Played()
    task = await calling(connection)
    if first == "the caller goes":
        task.cancel()
    connection.connection_lost(ConnectionResetError("reset by peer"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert connection._calls == {}


# -- the server ends a stream, or the connection


@pytest.mark.parametrize("answered", [False, True])
async def test_a_refused_stream_was_certainly_not_carried_out(answered: bool) -> None:
    connection = Played()
    task = await calling(connection)
    if answered:
        connection.hear(headers(1))
    connection.hear(reset(1, ErrorCode.REFUSED_STREAM))
    assert not (await failure(task)).sent
    assert connection.usable


@pytest.mark.parametrize("code", [*set(ErrorCode) - {ErrorCode.REFUSED_STREAM}, 99])
async def test_any_other_reset_leaves_it_unknown(code: int) -> None:
    connection = Played()
    task = await calling(connection)
    connection.hear(headers(1), data(1, framed(b"answer")), reset(1, code))
    failed = await failure(task)
    assert (failed.code, failed.sent) == (None, True)


async def test_goaway_lets_calls_under_way_end_and_then_closes() -> None:
    connection = Played()
    below, above = await calling(connection), await calling(connection)
    connection.hear(goaway(1))
    assert not (await failure(above)).sent
    assert not connection.usable
    assert not connection.wire.closing
    connection.answer(1)
    assert await below == b"answer"
    assert connection.wire.closing
    with pytest.raises(CallFailedError) as late:
        await connection.unary(PATH, b"late", 1.0)
    assert not late.value.sent


async def test_a_connection_that_is_lost_leaves_unknown_what_was_sent_alone() -> None:
    connection = Played((3, 2))
    sent = await calling(connection)
    connection.jam()
    held_back, waiting = await calling(connection), await calling(connection)
    connection.connection_lost(ConnectionResetError("reset by peer"))
    assert [(await failure(one)).sent for one in (sent, held_back, waiting)] == [True, False, False]
    assert not connection.usable


async def test_nonsense_ends_the_connection_and_leaves_all_calls_unknown() -> None:
    connection = Played()
    task = await calling(connection)
    connection.hear(frame(PING, 0, 0, b"short"))
    assert (await failure(task)).sent
    assert connection.wire.closing
    assert [one.kind for one in connection.wire.frames][-1] == GOAWAY


async def test_what_speaks_no_http2_took_no_call() -> None:
    connection = Http2Connection("http", "web:80")
    wire = Wire()
    connection.connection_made(wire)
    connection.data_received(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(CallFailedError, match="HTTP/2") as failed:
        await connection.settled_in()
    assert not failed.value.sent


async def test_calls_beyond_what_the_server_takes_wait_for_their_turn() -> None:
    connection = Played((3, 1))
    first, second, third = [await calling(connection) for _ in range(3)]
    assert len(connection.wire.of(HEADERS)) == 1
    connection.answer(1, b"first")
    await turns()
    assert len(connection.wire.of(HEADERS)) == 2
    third.cancel()
    await turns()
    connection.answer(3, b"second")
    assert [await first, await second] == [b"first", b"second"]
    assert len(connection.wire.of(HEADERS)) == 2


async def test_one_that_waits_in_vain_was_not_sent() -> None:
    connection = Played((3, 1))
    await calling(connection, timeout_s=3)
    assert not (await failure(await calling(connection))).sent


# -- signs of life


async def test_a_silent_server_is_asked_and_then_left() -> None:
    loop = asyncio.get_running_loop()
    connection = Played()
    began_s = loop.time()
    task = await calling(connection, timeout_s=60)
    failed = await failure(task)
    assert loop.time() - began_s == pytest.approx(PING_AFTER_S + PING_ANSWER_S)
    assert len(connection.wire.of(PING)) == 1
    assert "no sign of life" in str(failed)
    assert connection.wire.aborted


async def test_a_server_that_answers_a_ping_lives() -> None:
    connection = Played()
    task = await calling(connection, timeout_s=60)
    for number in range(1, 4):
        await asyncio.sleep(PING_AFTER_S + 0.5)
        assert len(connection.wire.of(PING)) == number
        connection.hear(frame(PING, ACK, 0, bytes(8)))
    connection.answer(1)
    assert await task == b"answer"


async def test_a_question_of_calls_that_have_ended_ends_no_later_one() -> None:
    connection = Played()
    task = await calling(connection, timeout_s=PING_AFTER_S + 1)
    await failure(task)
    await asyncio.sleep(60)
    task = await calling(connection, timeout_s=60)
    await asyncio.sleep(PING_AFTER_S + 1)
    assert len(connection.wire.of(PING)) == 2
    connection.answer(3)
    assert await task == b"answer"


async def test_a_connection_without_calls_says_nothing() -> None:
    connection = Played()
    task = await calling(connection)
    connection.answer(1)
    await task
    connection.wire.frames.clear()
    await asyncio.sleep(100)
    assert connection.wire.frames == []
    assert connection.usable


# -- streams


async def test_a_stream_carries_messages_both_ways_to_its_end() -> None:
    connection = Played()
    stream = connection.stream(PATH)
    stream.write(b"one")
    stream.write(b"two")
    assert [one.payload for one in connection.wire.of(DATA)] == [framed(b"one"), framed(b"two")]
    connection.hear(headers(1), data(1, framed(b"a") + framed(b"b")), trailers(1))
    assert [await stream.read() for _ in range(4)] == [b"a", b"b", None, None]
    with pytest.raises(CallFailedError):
        stream.write(b"three")


async def test_a_stream_that_is_not_read_is_held_at_its_window() -> None:
    connection = Played()
    stream = connection.stream(PATH)
    message = framed(bytes(STREAM_WINDOW // 8 - 5))
    connection.hear(headers(1))
    for _ in range(8):
        for at in range(0, len(message), MAX_FRAME_BYTES):
            connection.hear(data(1, message[at : at + MAX_FRAME_BYTES]))
    assert connection.wire.given_back() < STREAM_WINDOW // 2
    for _ in range(8):
        assert await stream.read() == bytes(STREAM_WINDOW // 8 - 5)
    assert connection.wire.given_back() > STREAM_WINDOW // 2


async def test_a_message_larger_than_the_window_comes_whole() -> None:
    connection = Played()
    stream = connection.stream(PATH)
    message = framed(bytes(3 * STREAM_WINDOW))
    room, sent = STREAM_WINDOW, 0
    connection.hear(headers(1))
    while sent < len(message):
        assert room > 0
        part = message[sent : sent + min(room, MAX_FRAME_BYTES)]
        connection.wire.frames.clear()
        connection.hear(data(1, part))
        sent += len(part)
        room += connection.wire.given_back(1) - len(part)
    assert await stream.read() == bytes(3 * STREAM_WINDOW)


async def test_a_cancelled_stream_ends_for_its_reader_too() -> None:
    connection = Played()
    stream = connection.stream(PATH)
    reading = asyncio.create_task(stream.read())
    await turns()
    stream.cancel()
    assert await reading is None
    assert len(connection.wire.of(RST_STREAM)) == 1


async def test_a_stream_of_a_lost_connection_ends_after_what_has_come() -> None:
    connection = Played()
    stream = connection.stream(PATH)
    connection.hear(headers(1), data(1, framed(b"last")))
    connection.connection_lost(None)
    assert await stream.read() == b"last"
    with pytest.raises(CallFailedError, match="closed by the other side"):
        await stream.read()


async def test_a_stream_that_waits_for_its_turn_keeps_what_is_written() -> None:
    connection = Played((3, 1))
    task = await calling(connection)
    stream = connection.stream(PATH)
    stream.write(b"early")
    connection.answer(1)
    await task
    assert [one.payload for one in connection.wire.of(DATA)][1:] == [framed(b"early")]
    connection.hear(window(3, 10))


async def test_a_retired_connection_ends_with_its_last_call_or_its_grace() -> None:
    for answered in (True, False):
        connection = Played()
        task = await calling(connection, timeout_s=30)
        connection.retire(3.0)
        assert not connection.usable
        if answered:
            connection.answer(1)
            assert await task == b"answer"
        else:
            assert (await failure(task)).sent
        assert connection.wire.closing


async def test_a_token_is_put_into_no_table() -> None:
    connection = Played()
    await calling(connection)
    head = connection.wire.of(HEADERS)[0].payload
    assert b"\x10\x05token\x01t" in head
    assert connection.wire.fields()[b"token"] == b"t"
