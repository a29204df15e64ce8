# SPDX-License-Identifier: Apache-2.0
"""Our HTTP/2 beside the package h2, on the same bytes of random servers, right and wrong."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from rdzv.store.http2.engine import Http2Engine
from rdzv.store.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_FRAME_BYTES,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    ConnectionFaultError,
    Engine,
    Fields,
    FrameReader,
    frame,
    literal,
)
from tests.support.store.h2_engine import H2Engine
from tests.support.store.http2_peer import GREETING, Listening, reset, settings, window

STEPS_EACH = 120

HEAD = literal(b":method", b"POST") + literal(b":path", b"/a/b")
FIELDS: list[Fields] = [
    ((b":status", b"200"), (b"content-type", b"application/grpc")),
    ((b":status", b"200"), (b"x-trace", b"a-value-that-is-new")),
    ((b":status", b"503"),),
]
TRAILERS: list[Fields] = [
    ((b"grpc-status", b"0"), (b"grpc-message", b"")),
    ((b"grpc-status", b"14"), (b"grpc-message", b"etcdserver: no leader")),
    ((b"x-many", b"v" * 300), (b"grpc-status", b"0")),
]


@dataclass
class Told:
    """What one engine made of it all: for each stream, and what it sent."""

    fields: dict[int, list[Fields]] = field(default_factory=lambda: defaultdict(list))
    data: dict[int, bytes] = field(default_factory=lambda: defaultdict(bytes))
    ended: set[int] = field(default_factory=set)
    broken: dict[int, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)


def told(heard: Listening) -> Told:
    found = Told()
    for one in heard.seen:
        match one.what, one.more:
            case "headers", (fields, ended):
                found.fields[one.stream_id].append(fields)
                found.ended |= {one.stream_id} if ended else set()
            case "data", (data, _, ended):
                found.data[one.stream_id] += data
                found.ended |= {one.stream_id} if ended else set()
            case "broken", int(code):
                found.broken[one.stream_id] = code
            case "refused", _:
                found.refused.add(one.stream_id)
    return found


class Server:
    """Writes what a right server may write next, with a table of headers of its own.

    No frame is padding alone, which hyperframe does not take.
    """

    def __init__(self) -> None:
        self.encoder = Encoder()
        self.open: dict[int, str] = {}
        """``asked``, ``answering``; what has ended is not in it."""

    def headers(self, stream_id: int, number: int, padding: int, cut: int, *, last: bool) -> bytes:
        fields = (*(TRAILERS if last else FIELDS)[number % 3], (b"x-number", b"%d" % (number % 7)))
        block = self.encoder.encode(fields, huffman=bool(number % 2))
        self.open[stream_id] = "answering"
        flags = END_STREAM if last else 0
        if last:
            del self.open[stream_id]
        first = block[: 1 + cut % len(block)]
        rest = block[len(first) :]
        padded = bytes((padding,)) + first + bytes(padding)
        if not rest:
            return frame(HEADERS, flags | PADDED | END_HEADERS, stream_id, padded)
        return frame(HEADERS, flags | PADDED, stream_id, padded) + frame(
            CONTINUATION, END_HEADERS, stream_id, rest
        )


STEPS = (
    *("begin", "begin", "open", "headers", "headers", "data", "data", "data", "last", "trailers"),
    *(
        "trailers",
        "window",
        "window",
        "room",
        "room",
        "settings",
        "ping",
        "reset",
        "cancel",
        "send",
    ),
)


class Pair:
    """Both engines, doing the same."""

    def __init__(self) -> None:
        self.heard = (Listening(), Listening())
        self.engines: tuple[Engine, Engine] = (Http2Engine(self.heard[0]), H2Engine(self.heard[1]))
        self.out = [b"", b""]
        self.server = Server()
        self.streams: list[int] = []
        self.feed(settings((4, 200), (3, 1000)))

    def feed(self, data: bytes, cuts: int = 1) -> list[str]:
        """Feed the same in the same pieces; return what each said of a fault."""
        faults = []
        for number, engine in enumerate(self.engines):
            fault = ""
            size = max(len(data) // cuts, 1)
            try:
                for at in range(0, len(data), size):
                    engine.feed(data[at : at + size])
            except ConnectionFaultError as error:
                fault = str(error) or "a fault"
            faults.append(fault)
            self.out[number] += engine.take()
        return faults

    def step(self, random: Random) -> bytes:
        """Do a random thing here, or return what the server writes."""
        what, one = random.choice(STEPS), random.randrange(1000)
        other, padding = random.randrange(1, 200), random.randrange(60)
        server = self.server
        if what in ("begin", "open"):
            body = bytes((one % 256,)) * (other + 1)
            ids = {engine.begin(HEAD, body, ended=what == "begin") for engine in self.engines}
            assert len(ids) == 1
            self.streams += ids
            server.open |= dict.fromkeys(ids, "asked" if what == "begin" else "asked, goes on")
        elif what == "ping":
            return frame(PING, 0, 0, one.to_bytes(8, "big"))
        elif what == "room":
            return window(0, one + 1)
        elif what == "settings":
            return settings((4, one), (5, MAX_FRAME_BYTES + other))
        if not server.open or what in ("begin", "open"):
            return b""
        stream_id = list(server.open)[one % len(server.open)]
        state = server.open[stream_id]
        match what:
            case "cancel":
                for engine in self.engines:
                    engine.cancel(stream_id)
                del server.open[stream_id]
            case "send" if state.endswith("goes on"):
                for engine in self.engines:
                    engine.send(stream_id, b"more" * other)
            case "window":
                return window(stream_id, one + 1)
            case "reset":
                del server.open[stream_id]
                return reset(stream_id, one % 14)
            case "headers" if state != "answering":
                return server.headers(stream_id, one, padding, other, last=False)
            case "trailers" if state == "answering":
                return server.headers(stream_id, one, padding, other, last=True)
            case "data" | "last" if state == "answering":
                last = what == "last"
                if last:
                    del server.open[stream_id]
                payload = bytes((padding,)) + bytes((one % 256,)) * other + bytes(padding)
                return frame(DATA, PADDED | (END_STREAM if last else 0), stream_id, payload)
        return b""

    def told(self) -> tuple[Told, Told]:
        for number, engine in enumerate(self.engines):
            self.out[number] += engine.take()
        ours, theirs = map(told, self.heard)
        return ours, theirs

    def requests(self, number: int) -> dict[int, tuple[bytes, bool, bool]]:
        """What went out on each stream: its data, its end, and a reset."""
        reader = FrameReader()
        found: dict[int, tuple[bytes, bool, bool]] = {}
        for one in reader.read(self.out[number].removeprefix(PREFACE)):
            if one.kind in (HEADERS, DATA, RST_STREAM):
                data, ended, was_reset = found.get(one.stream_id, (b"", False, False))
                found[one.stream_id] = (
                    data + (one.payload if one.kind == DATA else b""),
                    ended or bool(one.kind != RST_STREAM and one.flags & END_STREAM),
                    was_reset or one.kind == RST_STREAM,
                )
        return found


@given(st.integers(min_value=0))
def test_a_right_server_is_understood_alike(seed: int) -> None:
    random, pair = Random(seed), Pair()
    for _ in range(STEPS_EACH):
        assert pair.feed(pair.step(random), random.randrange(1, 50)) == ["", ""]
    ours, theirs = pair.told()
    assert ours == theirs
    sent, theirs_sent = pair.requests(0), pair.requests(1)
    for stream_id in pair.streams:
        data, ended, was_reset = sent.get(stream_id, (b"", False, False))
        # What was withdrawn before it left is not sent at all.
        if not was_reset and stream_id in sent:
            assert (data, ended) == theirs_sent[stream_id][:2]


BAD = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.builds(
        frame,
        st.integers(0, 10),
        st.integers(0, 255),
        st.sampled_from([0, 1, 2, 3, 5, 7, 99, (1 << 31) - 1]),
        st.binary(max_size=40),
    ),
    st.builds(settings, st.tuples(st.integers(0, 8), st.integers(0, (1 << 32) - 1))),
    st.builds(window, st.sampled_from([0, 1, 3]), st.integers(0, (1 << 31) - 1)),
)


@given(st.integers(min_value=0), st.lists(BAD, min_size=1, max_size=5))
def test_no_answer_of_a_wrong_server_is_believed_that_h2_does_not_believe(
    seed: int, wrong: list[bytes]
) -> None:
    """Where h2 sees a fault, ours sees one as well, or no more than a broken stream."""
    random, pair = Random(seed), Pair()
    for bad in wrong:
        for _ in range(random.randrange(30)):
            if any(pair.feed(pair.step(random))):
                return
        before = told(pair.heard[0]).ended
        ours, theirs = pair.feed(bad)
        if theirs and not ours:
            assert told(pair.heard[0]).ended == before, theirs
        if ours or theirs:
            return
        one, other = pair.told()
        assert one.ended <= other.ended
        assert all(one.data[stream_id] == other.data[stream_id] for stream_id in one.ended)
        assert all(one.fields[stream_id] == other.fields[stream_id] for stream_id in one.ended)


@given(st.binary(max_size=400), st.integers(1, 9))
def test_no_bytes_raise_anything_but_a_fault(data: bytes, cuts: int) -> None:
    for prefix in (b"", GREETING):
        engine = Http2Engine(Listening())
        engine.begin(HEAD, b"request", ended=True)
        size = max(len(data) // cuts, 1)
        with suppress(ConnectionFaultError):
            engine.feed(prefix)
            for at in range(0, len(data), size):
                engine.feed(data[at : at + size])
        assert engine.take()
