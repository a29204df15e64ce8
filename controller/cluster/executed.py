# SPDX-License-Identifier: Apache-2.0
"""A command in a container, as the API server's websocket shows it: channels of bytes. Pure."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""The subprotocols of one websocket with a channel for each stream, the newest first; what we read
of them is the same."""

KEPT_MOST = 64 * 2**20
"""The most output of one command to keep, in bytes: a pod may write without end."""

OUT, ERR, STATUS = 1, 2, 3
"""Numbers of channels: the first byte of each message."""

Wrote = Callable[[bool, str], None]
"""Called with a piece of output as it comes: whether it is of stderr, and its text."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that has ended: its exit status and its output."""

    status: int
    out: str
    err: str


class Execution:
    """The output of one command, message by message; ``wrote`` gets it instead if it is given.

    ``take`` raises ``ValueError`` if there is more to keep than ``KEPT_MOST``.
    """

    def __init__(self, wrote: Wrote | None = None) -> None:
        self._texts: dict[bool, list[str]] = {False: [], True: []}
        self._wrote = wrote or (lambda is_stderr, text: self._texts[is_stderr].append(text))
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {False: decoder("replace"), True: decoder("replace")}
        self._status = b""
        self._room = KEPT_MOST
        self._keeps = wrote is None

    def take(self, message: bytes) -> None:
        """Take in one message; a character may be split between two."""
        channel, content = message[:1], message[1:]
        if self._keeps or channel == bytes([STATUS]):
            self._room -= len(content)
        if self._room < 0:
            raise ValueError(f"it wrote more than {KEPT_MOST >> 20} MiB")
        if channel in (bytes([OUT]), bytes([ERR])):
            self._write(channel == bytes([ERR]), content)
        elif channel == bytes([STATUS]):
            self._status += content

    def ended(self) -> Ran | str:
        """Return the result after the last message, or the reason why there is none."""
        for is_stderr in (False, True):
            self._write(is_stderr, b"", final=True)
        status = _exit_status(self._status)
        if isinstance(status, str):
            return status
        return Ran(status, "".join(self._texts[False]), "".join(self._texts[True]))

    def _write(self, is_stderr: bool, content: bytes, *, final: bool = False) -> None:
        if text := self._decoders[is_stderr].decode(content, final):
            self._wrote(is_stderr, text)


def _exit_status(content: bytes) -> int | str:
    """Return the command's exit status, or the reason why it has none: it never ran, or was lost.

    ``content`` is a Status object of the API server.
    """
    if not content:
        return "the connection ended before the command did"
    try:
        status: dict[str, Any] = json.loads(content)
        if status.get("status") == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or []
        codes = [one["message"] for one in causes if one.get("reason") == "ExitCode"]
        return (
            int(codes[0]) if codes else str(status.get("message") or "it failed without a reason")
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its status cannot be read: {content[:200].decode('utf-8', 'replace')}"
