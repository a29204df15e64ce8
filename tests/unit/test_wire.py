# SPDX-License-Identifier: Apache-2.0
"""Frames survive any segmentation; what a relay keeps of a client's requests for the next one."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.tcpstore import wire
from launcher_shim.tcpstore.requests import RelayLedger, RequestParser

keys = st.binary(max_size=40)
values = st.binary(max_size=200)
numbers = st.integers(-(2**63), 2**63 - 1)
key_lists = st.lists(keys, max_size=5).map(tuple)
items = st.lists(st.tuples(keys, values), max_size=5).map(tuple)


BY_OPCODE: list[tuple[wire.Request, st.SearchStrategy[wire.Request]]] = [
    (wire.Validate(), st.nothing()),
    (wire.Set(b"", b""), st.builds(wire.Set, keys, values)),
    (wire.CompareSet(b"", b"", b""), st.builds(wire.CompareSet, keys, values, values)),
    (wire.Get(b""), st.builds(wire.Get, keys)),
    (wire.Add(b"", 0), st.builds(wire.Add, keys, numbers)),
    (wire.Check(()), st.builds(wire.Check, key_lists)),
    (wire.Wait(()), st.builds(wire.Wait, key_lists)),
    (wire.NumKeys(), st.just(wire.NumKeys())),
    (wire.DeleteKey(b""), st.builds(wire.DeleteKey, keys)),
    (wire.Append(b"", b""), st.builds(wire.Append, keys, values)),
    (wire.MultiGet(()), st.builds(wire.MultiGet, key_lists)),
    (wire.MultiSet(()), st.builds(wire.MultiSet, items)),
    (wire.CancelWait(), st.just(wire.CancelWait())),
    (wire.Ping(0), st.builds(wire.Ping, st.integers(0, 2**32 - 1))),
    (wire.QueuePush(b"", b""), st.builds(wire.QueuePush, keys, values)),
    (wire.QueuePop(b""), st.builds(wire.QueuePop, keys)),
    (wire.QueueLen(b""), st.builds(wire.QueueLen, keys)),
    (wire.ListKeys(), st.just(wire.ListKeys())),
    (wire.Barrier(b"", 0), st.builds(wire.Barrier, keys, numbers)),
]
"""torch's operations in the order of their codes: an empty one, and any."""
requests = st.one_of([any_of for _, any_of in BY_OPCODE])


def test_opcodes_are_those_of_torch() -> None:
    assert [wire.encode(empty)[0] for empty, _ in BY_OPCODE] == list(range(len(BY_OPCODE)))


def greeted() -> RequestParser:
    parser = RequestParser()
    assert parser.feed(wire.HANDSHAKE) == [wire.Validate()]
    return parser


def length(number: int) -> bytes:
    return struct.pack("<Q", number)


@given(st.lists(requests, max_size=8), st.data())
def test_requests_survive_any_segmentation(sent: list[wire.Request], data: st.DataObject) -> None:
    stream = wire.HANDSHAKE + b"".join(map(wire.encode, sent))
    some = st.lists(st.integers(0, len(stream)), max_size=12).map(sorted)
    cuts = data.draw(some | st.just(list(range(len(stream)))))
    parser = RequestParser()
    got: list[wire.Request] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += parser.feed(stream[start:stop])
    assert got == [wire.Validate(), *sent]
    assert list(map(type, got[1:])) == list(map(type, sent))
    assert parser.held == 0


@given(st.lists(st.binary(max_size=64), max_size=6))
def test_any_bytes_are_requests_or_a_frame_error(segments: list[bytes]) -> None:
    parser = greeted()
    try:
        got = [request for segment in segments for request in parser.feed(segment)]
    except wire.FrameError:
        pass
    else:
        assert len(b"".join(map(wire.encode, got))) + parser.held <= len(b"".join(segments))


def test_the_bytes_of_a_compare_set() -> None:
    frame = wire.encode(wire.CompareSet(b"/k", b"old", b"new!"))
    assert frame == b"\x02" + length(2) + b"/k" + length(3) + b"old" + length(4) + b"new!"


@pytest.mark.parametrize(
    "allowed",
    [
        wire.Get(b"k" * wire.KEY_MAX),
        wire.Set(b"k", b"v" * wire.VALUE_MAX),
        wire.CompareSet(b"k" * wire.KEY_MAX, b"v" * wire.VALUE_MAX, b"v" * wire.VALUE_MAX),
        wire.Check((b"",) * wire.KEYS_MAX),
        wire.MultiSet(((b"", b""),) * wire.KEYS_MAX),
    ],
    ids=lambda request: type(request).__name__,
)
def test_the_limits_themselves_are_allowed(allowed: wire.Request) -> None:
    assert greeted().feed(wire.encode(allowed)) == [allowed]


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (b"\x03" + length(wire.KEY_MAX + 1), "a key of 8193 bytes; at most 8192"),
        (b"\x01" + length(1) + b"k" + length(wire.VALUE_MAX + 1), "a value of 8388609 bytes"),
        (b"\x05" + length(wire.KEYS_MAX + 1), "131073 keys in one request; at most 131072"),
        (b"\x0b" + length(wire.KEYS_MAX + 1), "131073 keys in one request"),
        (b"\x03" + length(2**64 - 1), "a key of 18446744073709551615 bytes"),
        (b"\x13", "no TCPStore operation 19"),
        (wire.HANDSHAKE, "sends its handshake again"),
    ],
)
def test_beyond_the_limits_is_a_frame_error(frame: bytes, sentence: str) -> None:
    with pytest.raises(wire.FrameError, match=sentence):
        greeted().feed(frame)


def test_one_request_cannot_grow_without_bound() -> None:
    parser = greeted()
    parser.feed(b"\x0b" + length(wire.KEYS_MAX))
    item = wire.vec(b"k") + wire.vec(b"v" * wire.VALUE_MAX)
    for _ in range(3):
        assert parser.feed(item) == []
    with pytest.raises(wire.FrameError, match="a request of more than 33554432 bytes"):
        parser.feed(item)
    assert parser.held <= wire.REQUEST_MAX


@pytest.mark.parametrize(
    "head",
    [
        b"\x05" + length(wire.KEYS_MAX),
        b"\x01" + length(1) + b"k" + length(wire.VALUE_MAX),
        b"\x0b" + length(wire.KEYS_MAX) + length(wire.KEY_MAX),
    ],
)
def test_an_announced_length_allocates_nothing(head: bytes) -> None:
    parser = greeted()
    tracemalloc.start()
    try:
        assert parser.feed(head) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024
    assert parser.held <= len(head)


def test_requests_before_a_faulty_one_are_not_lost() -> None:
    good = wire.Set(b"/k", b"v")
    with pytest.raises(wire.FrameError) as caught:
        greeted().feed(wire.encode(good) + b"\xff")
    assert caught.value.before == (good,)


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (b"\x00" + length(5) + b"/init", "torch before 2.2"),
        (b"\x03" + length(40) + b"/", "torch before 2.2"),
        (b"\x04" + length(1) + length(5), "torch before 2.2"),
        (b"GET / HTTP/1.1\r\n", "no torch TCPStore: it begins with b'GET / HT'"),
        (b"\x16\x03\x01\x02\x00", "no torch TCPStore"),
        (b"\x00\x3c\x85\xf7\xce", "no torch TCPStore"),
    ],
)
def test_another_client_is_named(first: bytes, sentence: str) -> None:
    parser = RequestParser()
    with pytest.raises(wire.FrameError, match=sentence):
        parser.feed(first)
    assert not parser.greeted


@pytest.mark.parametrize(
    ("answer", "frame"),
    [
        (wire.vec(b"ab"), length(2) + b"ab"),
        (wire.i64(-2), b"\xfe" + b"\xff" * 7),
        (wire.multi_get([b"", b"x"]), length(0) + length(1) + b"x"),
        (wire.key_list([b"/a"]), length(1) + length(2) + b"/a"),
        (wire.popped(0, b""), length(0)),
        (wire.popped(2, b""), length(2) + length(0)),
        (wire.pong(0x01020304), b"\x04\x03\x02\x01"),
        (wire.READY + wire.NOT_READY + wire.STOP_WAITING + wire.WAIT_CANCELED, b"\0\1\0\1"),
    ],
)
def test_answers(answer: bytes, frame: bytes) -> None:
    assert answer == frame


@pytest.mark.parametrize("answer", [wire.multi_get, wire.key_list])
def test_an_answer_beyond_the_limit_is_refused(
    answer: Callable[[Sequence[bytes]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "ANSWER_MAX", 100)
    assert answer([bytes(42)] * 2)
    with pytest.raises(wire.FrameError, match="an answer of more than 100 bytes"):
        answer([bytes(42), bytes(43)])


SESSION = bytes(range(16))


def told(ledger: RelayLedger) -> tuple[wire.Preface, list[wire.Request]]:
    """What a sidecar reads that is connected to now."""
    parser = RequestParser()
    handshake, *requests = parser.feed(ledger.begin())
    assert handshake == wire.Validate()
    assert parser.preface is not None
    return parser.preface, requests


def test_a_first_sidecar_is_told_that_nothing_was_done_before() -> None:
    ledger = RelayLedger(SESSION)
    assert not ledger.was_sent
    ledger.add(wire.Get(b"/a"), connected=False)
    assert told(ledger) == (wire.Preface(SESSION, 1), [wire.Get(b"/a")])
    assert ledger.was_sent


def test_the_next_one_is_sent_what_is_unsettled_under_the_same_numbers() -> None:
    ledger = RelayLedger(SESSION)
    told(ledger)
    for request in (wire.Wait((b"/w",)), wire.Add(b"/n", 1), wire.Set(b"/s", b"v")):
        ledger.add(request, connected=True)
    assert ledger.settle(2, wire.i64(1)) == wire.i64(1)
    ledger.note = b"note"
    ledger.add(wire.Get(b"/late"), connected=False)
    preface, requests = told(ledger)
    assert preface == wire.Preface(SESSION, 4, (1, 3), b"note")
    assert requests == [wire.Wait((b"/w",)), wire.Set(b"/s", b"v"), wire.Get(b"/late")]


@pytest.mark.parametrize(("given_up_first", "answer"), [(True, b""), (False, wire.STOP_WAITING)])
def test_what_is_given_up_is_settled_with_its_cancellation(
    given_up_first: bool, answer: bytes
) -> None:
    """Of an answer that comes after the cancellation the client has no use."""
    ledger = RelayLedger(SESSION)
    told(ledger)
    ledger.add(wire.Wait((b"/w",)), connected=True)
    ledger.add(wire.CancelWait(), connected=True)
    assert len(ledger) == 2
    if not given_up_first:
        assert ledger.settle(1, wire.STOP_WAITING) == answer
    assert ledger.settle(2, wire.WAIT_CANCELED) == wire.WAIT_CANCELED
    assert len(ledger) == ledger.held == 0
    if given_up_first:
        assert ledger.settle(1, wire.STOP_WAITING) == answer


REQUESTS = st.sampled_from(
    [wire.Get(b"/a"), wire.Add(b"/n", 1), wire.Set(b"/s", b"v"), wire.Wait((b"/w",)), wire.Ping(7)]
)
EVENTS = st.lists(st.one_of(REQUESTS, st.sampled_from(["settle", "lost", "connected"])))


@given(EVENTS, st.randoms(use_true_random=False))
def test_every_sidecar_reads_each_request_under_its_one_number(
    events: list[wire.Request | str], random: Random
) -> None:
    """Whatever order things happen in; a request is marked as repeated iff it was sent before."""
    ledger = RelayLedger(SESSION)
    connected, asked = False, 0
    sent: set[int] = set()
    unsettled: dict[int, wire.Request] = {}
    for event in events:
        if event == "connected" and not connected:
            connected = True
            preface, requests = told(ledger)
            numbers = [*preface.again, *range(preface.following, asked + 1)]
            assert dict(zip(numbers, requests, strict=True)) == unsettled
            assert set(preface.again) == sent & set(unsettled)
            sent |= set(numbers)
        elif event == "lost":
            connected = False
        elif event == "settle" and connected and unsettled:
            number = random.choice(sorted(unsettled))
            del unsettled[number]
            assert ledger.settle(number, b"answer") == b"answer"
        elif not isinstance(event, str):
            asked += 1
            unsettled[asked] = event
            ledger.add(event, connected=connected)
            if connected:
                sent.add(asked)
        assert ledger.held == sum(len(wire.encode(request)) for request in unsettled.values())


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_preface_may_come_in_pieces(cut: int) -> None:
    preface = wire.Preface(SESSION, 9, (3, 5), b"a note")
    stream = preface.encode() + wire.HANDSHAKE + wire.encode(wire.Get(b"/a"))
    parser = RequestParser()
    requests = parser.feed(stream[:cut]) + parser.feed(stream[cut:])
    assert requests == [wire.Validate(), wire.Get(b"/a")]
    assert parser.preface == preface


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (b"MUSTER-9" + bytes(40), "another version"),
        (wire.Preface(SESSION, 3, (3,)).encode(), "future"),
        (wire.Preface(SESSION, 3, (0,)).encode(), "future"),
        (wire.Preface(SESSION, 2**64 - 1).encode(), "limits"),
        (wire.Preface(SESSION, 1, (), bytes(wire.NOTE_MAX + 1)).encode(), "limits"),
    ],
)
def test_a_preface_that_cannot_be_is_refused(stream: bytes, why: str) -> None:
    with pytest.raises(wire.FrameError, match=why):
        RequestParser().feed(stream + wire.HANDSHAKE)


@given(st.binary(max_size=300))
def test_i8_no_preface_does_more_than_fail(data: bytes) -> None:
    parser = RequestParser()
    with suppress(wire.FrameError):
        requests = parser.feed(wire.RELAY_MAGIC + data)
        assert requests == [] or parser.preface is not None


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=40))), st.integers(1, 9))
def test_answers_arrive_whole_whatever_the_pieces(
    answers: list[tuple[int, bytes]], piece: int
) -> None:
    stream = b"".join(wire.numbered(number, answer) for number, answer in answers)
    parser, found = wire.AnswerParser(), []
    for at in range(0, len(stream), piece):
        found += parser.feed(stream[at : at + piece])
    assert found == answers


def test_what_its_client_did_not_wait_for_is_owed_to_it() -> None:
    ledger = RelayLedger(SESSION)
    told(ledger)
    ledger.add(wire.Wait((b"/w",)), connected=True)
    ledger.add(wire.Get(b"/a"), connected=True)
    assert not ledger.owes
    assert ledger.busy
    ledger.settle(2, wire.vec(b""))
    assert not ledger.busy
    ledger.add(wire.Set(b"/s", b"v"), connected=True)
    assert ledger.owes
    ledger.settle(3, b"")
    assert not ledger.owes
