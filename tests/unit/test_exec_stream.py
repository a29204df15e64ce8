# SPDX-License-Identifier: Apache-2.0
"""A stream of numbered frames over connections that are cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from launcher_shim.horovod.exec.frames import (
    ACK,
    ATTACHED,
    STDERR,
    STDOUT,
    WINDOW,
    Decoder,
    ExecFrameError,
    Frame,
    Stream,
    encode,
)


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
    "frame",
    [
        Frame(STDOUT, b"x", 0),
        Frame(STDOUT, b"x", 2),
        Frame(ACK, number=2),
        Frame(ATTACHED),
    ],
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
