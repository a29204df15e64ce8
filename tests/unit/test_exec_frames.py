# SPDX-License-Identifier: Apache-2.0
"""Frames between the launcher's side of a worker and the agent beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.horovod.exec.frames import (
    ABANDON,
    ACK,
    ATTACH,
    BODY_MAX,
    EXIT,
    HEAD_SIZE,
    START,
    STDOUT,
    Attaching,
    Decoder,
    ExecFrameError,
    Frame,
    encode,
    encode_attaching,
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
