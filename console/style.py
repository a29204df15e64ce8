# SPDX-License-Identifier: Apache-2.0
"""Colours and symbols on a terminal; elsewhere, and with ``NO_COLOR``, output is plain text."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import IO, TextIO

import click

from agent.verdict.states import Level

COLOURS: Mapping[Level, str] = {
    "fault": "red",
    "warning": "yellow",
    "note": "cyan",
    "ok": "green",
}

_SYMBOLS: Mapping[Level, str] = {"fault": "✗", "warning": "!", "note": "·", "ok": "✓"}


TERMINAL = "MUSTER_TERMINAL"
"""The variable of a command whose output the terminal of another machine shows: which of ``stdout``
and ``stderr`` go there. ``COLUMNS`` is the width."""


def on_terminal(stream: IO[str]) -> bool:
    """Return whether people read ``stream`` on a terminal, of this machine or of another."""
    far = os.environ.get(TERMINAL, "").split(",")
    is_far = (stream is sys.stdout and "stdout" in far) or (
        stream is sys.stderr and "stderr" in far
    )
    return is_far or stream.isatty()


def is_styled(stream: IO[str]) -> bool:
    """Return whether colours and symbols may be written to ``stream``."""
    if not on_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"


def symbol(level: Level, stream: TextIO) -> str:
    """Return the sign of a level: a coloured symbol, or the word, for a column of its own."""
    return coloured(_SYMBOLS[level], level, stream) if is_styled(stream) else f"{level:<8}"


def coloured(text: str, level: Level, stream: TextIO) -> str:
    """Return ``text`` in the colour of a level."""
    return click.style(text, fg=COLOURS[level]) if is_styled(stream) else text
