# SPDX-License-Identifier: Apache-2.0
"""Frames of a remote command are read whole, and kept until the other end has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from launcher_shim.rundir.exec_frames import (
    ABANDON,
    ACK,
    ATTACH,
    ATTACHED,
    BODY_MAX,
    EXIT,
    HEAD_SIZE,
    LEASE_TTL_S,
    MARGIN_S,
    START,
    STDERR,
    STDOUT,
    WINDOW,
    Attaching,
    Decoder,
    ExecFrameError,
    Frame,
    Stream,
    delivered_lease_ttl_s,
    encode,
    encode_attaching,
    patience_s,
    read_attaching,
    read_status,
)

SESSION = "0123456789abcdef" * 2
numbers = st.integers(0, (1 << 63) - 1)
frames = st.lists(
    st.builds(Frame, st.sampled_from([START, ACK, STDOUT, EXIT]), st.binary(max_size=50), numbers)
)


@given(frames, st.data())
def test_frames_survive_however_they_are_cut(sent: list[Frame], data: st.DataObject) -> None:
    rest = b"".join(encode(*frame) for frame in sent)
    decoder, got = Decoder(), []
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        got += decoder.feed(rest[:cut])
        rest = rest[cut:]
    assert got == sent


@given(st.binary(max_size=200))
def test_i8_any_bytes_are_frames_or_refused(data: bytes) -> None:
    try:
        frames = Decoder().feed(data)
    except ExecFrameError:
        return
    assert sum(HEAD_SIZE + len(frame.body) for frame in frames) <= len(data)


@pytest.mark.parametrize(
    "data", [b"\x00\x00\x00\x01\x63", b"\xff\xff\xff\xff\x03", b"\x00\x08\x00\x01\x03"]
)
def test_a_frame_that_cannot_be_is_refused_before_its_body_comes(data: bytes) -> None:
    with pytest.raises(ExecFrameError):
        Decoder().feed(data + bytes(8))


@given(numbers, numbers, numbers, st.sampled_from([ATTACH, ABANDON]))
def test_what_attaches_is_read_back(attempt: int, acknowledged: int, had: int, kind: int) -> None:
    attaching = Attaching("node-0.1a2b3c4d", SESSION, attempt, acknowledged, had)
    (frame,) = Decoder().feed(encode_attaching(attaching, kind))
    assert (frame.kind, read_attaching(frame)) == (kind, attaching)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{}", b"\xff", b"7", b"[" * 100_000),
        b'{"host": 1, "session": "' + SESSION.encode() + b'", "attempt": 1, "acknowledged": 0}',
        b'{"host": "a", "session": "x", "attempt": 1, "acknowledged": 0}',
        b'{"host": "a", "session": "' + SESSION.encode() + b'", "attempt": 1, "acknowledged": -1}',
        b'{"host": "a", "session": "'
        + SESSION.encode()
        + b'", "attempt": true, "acknowledged": 0}',
    ],
)
def test_i8_what_attaches_to_nothing_is_refused(body: bytes) -> None:
    with pytest.raises(ExecFrameError):
        read_attaching(Frame(ATTACH, body))


@given(st.binary(max_size=200), st.integers(0, 12), numbers)
def test_i8_any_first_frame_is_read_or_refused(body: bytes, kind: int, number: int) -> None:
    with pytest.raises(ExecFrameError):
        read_attaching(Frame(kind, body, number))


def test_a_command_that_is_too_long_is_refused_where_it_is_made() -> None:
    with pytest.raises(ExecFrameError, match="longer than"):
        encode(START, b"x" * (BODY_MAX + 1))


@pytest.mark.parametrize("status", [0, 1, 134, 255])
def test_a_status_is_read_back(status: int) -> None:
    assert read_status(b"%d" % status) == status


@pytest.mark.parametrize("body", [b"", b"-1", b"256", b"0000", b"1.0", b" 0", b"x", b"\xb2"])
def test_no_garbled_status_is_taken_for_success(body: bytes) -> None:
    with pytest.raises(ExecFrameError):
        read_status(body)


class End:
    """One end, what is on its way to it, and what it was told to send and has got."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.decoder = Decoder()
        self.coming = b""
        self.sent: list[tuple[int, bytes]] = []
        self.got: list[tuple[int, bytes]] = []
        self.attached = False

    def take(self, count: int) -> None:
        """Let so many bytes arrive."""
        data, self.coming = self.coming[:count], self.coming[count:]
        for frame in self.decoder.feed(data):
            counting = self.stream.receive(frame)
            if counting is not None:
                self.got.append(counting[:2])


class CutConnections(RuleBasedStateMachine):
    """Any schedule of sending, arriving, acknowledging, cutting and attaching anew."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = (End(), End())
        self.connected = False

    def other(self, end: End) -> End:
        return self.ends[1 - self.ends.index(end)]

    @rule(
        side=st.integers(0, 1), kind=st.sampled_from([STDOUT, STDERR]), body=st.binary(max_size=9)
    )
    def send(self, side: int, kind: int, body: bytes) -> None:
        end = self.ends[side]
        end.sent.append((kind, body))
        data = end.stream.send(kind, body)
        if self.connected:
            self.other(end).coming += data

    @precondition(lambda self: self.connected)
    @rule(side=st.integers(0, 1), count=st.integers(1, 80))
    def arrive(self, side: int, count: int) -> None:
        self.ends[side].take(count)

    @precondition(lambda self: self.connected)
    @rule(side=st.integers(0, 1))
    def acknowledge(self, side: int) -> None:
        end = self.ends[side]
        self.other(end).coming += end.stream.acknowledgement()

    @precondition(lambda self: self.connected)
    @rule(first=st.integers(0, 80), second=st.integers(0, 80))
    def cut(self, first: int, second: int) -> None:
        """Some of what is on its way still arrives; the rest is lost."""
        for end, count in zip(self.ends, (first, second), strict=True):
            end.take(count)
            end.coming, end.decoder = b"", Decoder()
        self.connected = False

    @precondition(lambda self: not self.connected)
    @rule()
    def attach(self) -> None:
        received = [end.stream.received for end in self.ends]
        for end, number in zip(self.ends, reversed(received), strict=True):
            self.other(end).coming = b"".join(end.stream.resume(number))
        self.connected = True

    @invariant()
    def nothing_is_lost_doubled_or_disordered(self) -> None:
        for end in self.ends:
            assert end.got == self.other(end).sent[: len(end.got)]

    def teardown(self) -> None:
        if not self.connected:
            self.attach()
        for end in self.ends:
            end.take(len(end.coming))
            self.other(end).coming += end.stream.acknowledgement()
        for end in self.ends:
            end.take(len(end.coming))
            assert end.got == self.other(end).sent
            assert (end.stream.all_acknowledged, end.stream.kept_bytes) == (True, 0)


TestCutConnections = CutConnections.TestCase


def test_whoever_does_not_acknowledge_makes_the_sender_wait() -> None:
    stream = Stream()
    while stream.has_room:
        stream.send(STDOUT, bytes(65536))
    assert WINDOW <= stream.kept_bytes < WINDOW + 70_000
    stream.receive(Frame(ACK, number=stream.sent))
    assert (stream.has_room, stream.kept_bytes) == (True, 0)


@pytest.mark.parametrize(
    "frame", [Frame(STDOUT, b"x", 0), Frame(STDOUT, b"x", 2), Frame(ACK, number=2), Frame(ATTACHED)]
)
def test_i8_what_cannot_follow_is_refused(frame: Frame) -> None:
    stream = Stream()
    stream.send(STDOUT, b"one")
    with pytest.raises(ExecFrameError):
        stream.receive(frame)


@pytest.mark.parametrize("number", [0, 2])
def test_i8_who_has_had_less_than_before_or_more_than_was_sent_is_refused(number: int) -> None:
    stream = Stream()
    stream.send(STDOUT, b"one")
    stream.receive(Frame(ACK, number=1))
    with pytest.raises(ExecFrameError):
        stream.resume(number)


def test_a_frame_as_long_as_can_be_passes() -> None:
    assert len(encode(STDOUT, bytes(65536))) < WINDOW


@pytest.mark.parametrize(
    ("delivered", "lease_ttl_s"),
    [
        ("MUSTER_HOST=node-0.1a2b3c4d\nMUSTER_LEASE_TTL=60\n", 60),
        ("MUSTER_LEASE_TTL=3600\n", 3600),
        ("MUSTER_LEASE_TTL=\n", LEASE_TTL_S),
        ("MUSTER_LEASE_TTL=\u0663\n", LEASE_TTL_S),
        ("MUSTER_LEASE_TTL=-1\nA\n", LEASE_TTL_S),
        ("", LEASE_TTL_S),
        (None, LEASE_TTL_S),
    ],
)
def test_it_follows_the_lease_that_the_sidecar_delivers(
    tmp_path: Path, delivered: str | None, lease_ttl_s: int
) -> None:
    if delivered is not None:
        (tmp_path / "env").write_text(delivered, encoding="utf-8")
    assert patience_s(delivered_lease_ttl_s(str(tmp_path))) == lease_ttl_s + MARGIN_S
