# SPDX-License-Identifier: Apache-2.0
"""What a relay keeps of a client's requests, and what the next sidecar is told of it."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.tcpstore import wire
from launcher_shim.tcpstore.requests import RelayLedger, RequestParser

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


def test_what_is_given_up_is_settled_with_its_cancellation() -> None:
    ledger = RelayLedger(SESSION)
    told(ledger)
    ledger.add(wire.Wait((b"/w",)), connected=True)
    ledger.add(wire.CancelWait(), connected=True)
    assert len(ledger) == 2
    assert ledger.settle(2, wire.WAIT_CANCELED) == wire.WAIT_CANCELED
    assert len(ledger) == ledger.held == 0
    assert ledger.settle(1, wire.STOP_WAITING) == b""


def test_an_answer_that_is_there_before_the_cancellation_reaches_the_client_as_well() -> None:
    ledger = RelayLedger(SESSION)
    told(ledger)
    ledger.add(wire.Wait((b"/w",)), connected=True)
    ledger.add(wire.CancelWait(), connected=True)
    assert ledger.settle(1, wire.STOP_WAITING) == wire.STOP_WAITING
    assert ledger.settle(2, wire.WAIT_CANCELED) == wire.WAIT_CANCELED


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
