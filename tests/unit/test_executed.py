# SPDX-License-Identifier: Apache-2.0
"""What a command in a container says by the channels of its websocket."""

from __future__ import annotations

import json

import pytest

from controller.cluster.executed import Execution, Ran
from tests.support.containers import status_of


def message(channel: int, content: bytes) -> bytes:
    return bytes([channel]) + content


def taken(*messages: bytes) -> Ran | str:
    execution = Execution()
    for one in messages:
        execution.take(one)
    return execution.ended()


def status(ended: Ran | str) -> bytes:
    return message(3, json.dumps(status_of(ended)).encode())


def test_output_of_both_streams_and_the_exit_status() -> None:
    told = (message(1, b"a\n"), message(2, b"warn\n"), message(1, b"b\n"))
    assert taken(*told, status(Ran(0, "", ""))) == Ran(0, "a\nb\n", "warn\n")
    assert taken(status(Ran(66, "", ""))) == Ran(66, "", "")


def test_a_character_split_between_messages_is_whole() -> None:
    assert taken(message(1, b"\xe2\x86"), message(1, b"\x92"), status(Ran(0, "", ""))) == Ran(
        0, "→", ""
    )


def test_bytes_that_are_no_text_are_shown_as_replaced() -> None:
    assert taken(message(1, b"\xff\xe2"), status(Ran(0, "", ""))) == Ran(0, "\ufffd\ufffd", "")


def test_output_goes_to_its_reader_as_it_comes() -> None:
    heard: list[tuple[bool, str]] = []
    execution = Execution(lambda is_stderr, text: heard.append((is_stderr, text)))
    execution.take(message(1, b"now"))
    execution.take(message(2, b"why"))
    assert heard == [(False, "now"), (True, "why")]
    execution.take(status(Ran(1, "", "")))
    assert execution.ended() == Ran(1, "", "")


@pytest.mark.parametrize("channel", [1, 2, 3])
def test_a_pod_that_writes_without_end_takes_no_memory_without_end(channel: int) -> None:
    execution, piece = Execution(), message(channel, b"x" * 2**20)
    for _ in range(64):
        execution.take(piece)
    with pytest.raises(ValueError, match="more than 64 MiB"):
        execution.take(piece)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ((message(1, b"a"),), "the connection ended before the command did"),
        ((status("no such container"),), "no such container"),
        ((message(3, b"{"),), "its status cannot be read: {"),
        ((message(3, b"[]"),), "its status cannot be read: []"),
        ((b"", message(9, b"new"), message(3, b"{}")), "it failed without a reason"),
    ],
)
def test_a_command_without_a_status_has_a_reason(messages: tuple[bytes, ...], why: str) -> None:
    assert taken(*messages) == why
