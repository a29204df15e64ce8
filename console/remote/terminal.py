# SPDX-License-Identifier: Apache-2.0
"""The output of a command in a sidecar, on its way to the user's terminal."""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from console.job.changing import ASKED_BY, requester
from console.remote.sidecar import Lines
from console.styling import TERMINAL, columns_of, is_styled
from controller.cluster.executed import KEPT_MOST

PRINTED_MOST = 10_000
"""The lines of a history to know again: more than a store keeps of one job."""

TAIL = 4096
"""Length of the end of stderr that is kept, to see why a command failed, in characters."""


_SEQUENCE = re.compile(r"\x1b\[(?:[0-9;]{0,32}[A-HJKm]|\?(?:25|1049)[hl])")
"""The sequences that Muster itself prints: colours, moves of the cursor, the screen of a table."""
_BEGUN = re.compile(r"\x1b(?:\[[0-9;?]{0,32})?\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


def cut_sequence(text: str) -> tuple[str, str]:
    """Cut off the begin of a terminal's sequence at the end of ``text``: pure."""
    begun = _BEGUN.search(text)
    at = begun.start() if begun else len(text)
    return text[:at], text[at:]


def harmless(text: str) -> str:
    """Return ``text`` with those sequences alone that Muster prints: pure.

    A pod may have anything in the place of its sidecar. Its words must not act on the terminal.
    """
    pieces, at = [], 0
    for found in _SEQUENCE.finditer(text):
        pieces += [_shown(text[at : found.start()]), found.group()]
        at = found.end()
    return "".join([*pieces, _shown(text[at:])])


def _shown(text: str) -> str:
    return _CONTROL.sub(lambda one: repr(one.group())[1:-1], text.replace("\x1b", "\\x1b"))


class ReaderGone(Exception):
    """The reader of our output has exited."""


@dataclass(slots=True)
class ShownOutput:
    """The output of the command, on its way to the user.

    ``history``: lines that another pod has printed before are left out. ``err``: the end of stderr.
    """

    whole: bool
    history: bool = False
    err: str = ""
    out: str = ""
    began: bool = False
    _printed: dict[bytes, None] = field(default_factory=dict)
    """Digests of the lines that were printed last."""
    lines: Lines = field(default_factory=Lines)
    """Those of one pod."""
    _held: dict[bool, str] = field(default_factory=dict)
    """The begin of a sequence whose end has not come yet, for stderr or not."""

    def take(self, is_stderr: bool, text: str) -> None:
        """Print a piece of output, or keep it if it is to be shown as a whole."""
        self.began = True
        if is_stderr:
            self.err = (self.err + text)[-TAIL:]
            self._print(sys.stderr, text)
        elif self.whole:
            self.out += text
            if len(self.out) > KEPT_MOST:
                raise ValueError(f"it wrote more than {KEPT_MOST >> 20} MiB")
        elif self.history:
            self._take_lines(text)
        else:
            self._print(sys.stdout, text)

    def _take_lines(self, text: str) -> None:
        for line in self.lines.take(text):
            digest = blake2b(line.encode("utf-8", "replace"), digest_size=16).digest()
            if digest not in self._printed:
                self._print(sys.stdout, f"{line}\n")
            self._printed[digest] = None
            if len(self._printed) > PRINTED_MOST:
                del self._printed[next(iter(self._printed))]

    def _print(self, stream: Any, text: str) -> None:
        held = self._held.get(stream is sys.stderr, "") + text
        whole, self._held[stream is sys.stderr] = cut_sequence(held)
        try:
            stream.write(harmless(whole))
            stream.flush()
        except BrokenPipeError as error:
            # The client of the API server takes an OSError for one of its connection.
            raise ReaderGone from error


def environment() -> dict[str, str]:
    """Return the variables by which a command prints for this terminal, and knows who asks."""
    far = [name for name, one in (("stdout", sys.stdout), ("stderr", sys.stderr)) if one.isatty()]
    environ = {ASKED_BY: requester(socket.gethostname())}
    if not far:
        return environ
    environ[TERMINAL] = ",".join(far)
    shown = sys.stdout if sys.stdout.isatty() else sys.stderr
    environ["COLUMNS"] = str(columns_of(shown))
    environ["LINES"] = str(os.get_terminal_size(shown.fileno()).lines or 24)
    environ["TERM"] = os.environ.get("TERM", "xterm")
    if not is_styled(shown):
        environ["NO_COLOR"] = "1"
    return environ
