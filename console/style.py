# SPDX-License-Identifier: Apache-2.0
"""Colours and symbols on a terminal; elsewhere, and with ``NO_COLOR``, output is plain text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

import click

from agent.verdict.states import Level

COLOURS: Mapping[Level, str] = {
    "fault": "red",
    "warning": "yellow",
    "note": "cyan",
    "ok": "green",
}

_SYMBOLS: Mapping[Level, str] = {"fault": "✗", "warning": "!", "note": "·", "ok": "✓"}


def is_styled(stream: TextIO) -> bool:
    """Return whether colours and symbols may be written to ``stream``."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def symbol(level: Level, stream: TextIO) -> str:
    """Return the sign of a level: a coloured symbol, or the word, for a column of its own."""
    return coloured(_SYMBOLS[level], level, stream) if is_styled(stream) else f"{level:<8}"


def coloured(text: str, level: Level, stream: TextIO) -> str:
    """Return ``text`` in the colour of a level."""
    return click.style(text, fg=COLOURS[level]) if is_styled(stream) else text
