# SPDX-License-Identifier: Apache-2.0
"""Frames between the launcher's side of a worker and the agent beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.horovod.exec.frames import (
    ALIVE,
    BODY_MAX,
    EXIT,
    START,
    STDOUT,
    Decoder,
    ExecFrameError,
    Frame,
    encode,
    encode_start,
    read_start,
    read_status,
)

frames = st.lists(st.tuples(st.sampled_from([START, ALIVE, STDOUT, EXIT]), st.binary(max_size=50)))


@given(frames, st.data())
def test_frames_survive_however_they_are_cut(
    sent: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    rest = b"".join(encode(kind, body) for kind, body in sent)
    decoder, got = Decoder(), []
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        got += decoder.feed(rest[:cut])
        rest = rest[cut:]
    assert got == [Frame(kind, body) for kind, body in sent]


@given(st.binary(max_size=200))
def test_i8_any_bytes_are_frames_or_refused(data: bytes) -> None:
    try:
        frames = Decoder().feed(data)
    except ExecFrameError:
        return
    assert sum(5 + len(frame.body) for frame in frames) <= len(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x01\x63",
        b"\x00\x00\x00\x00\x02",
        b"\xff\xff\xff\xff\x03",
        (BODY_MAX + 2).to_bytes(4, "big") + b"\x03",
    ],
)
def test_a_frame_that_cannot_be_is_refused_before_its_body_comes(data: bytes) -> None:
    with pytest.raises(ExecFrameError):
        Decoder().feed(data)


@given(st.text(), st.text())
def test_a_start_is_read_back(host: str, command: str) -> None:
    (frame,) = Decoder().feed(encode_start(host, command))
    assert read_start(frame.body) == (host, command)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"host": "a"}', b'{"host": 1, "command": "x"}', b"\xff", b"7"]
)
def test_a_start_that_says_too_little_is_refused(body: bytes) -> None:
    with pytest.raises(ExecFrameError):
        read_start(body)


def test_a_command_that_is_too_long_is_refused_where_it_is_made() -> None:
    with pytest.raises(ExecFrameError, match="longer than"):
        encode_start("a", "x" * BODY_MAX)


@pytest.mark.parametrize("status", [0, 1, 134, 255])
def test_a_status_is_read_back(status: int) -> None:
    assert read_status(b"%d" % status) == status


@pytest.mark.parametrize("body", [b"", b"-1", b"256", b"0000", b"1.0", b" 0", b"x", b"\xb2"])
def test_no_garbled_status_is_taken_for_success(body: bytes) -> None:
    with pytest.raises(ExecFrameError):
        read_status(body)
