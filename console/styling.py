# SPDX-License-Identifier: Apache-2.0
"""Text on a terminal: colours, symbols, and long lines wrapped at word boundaries.

Output to anything else, and with ``NO_COLOR``, is plain text; there each line stays whole, as for
``grep``.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Mapping
from typing import IO, Literal, TextIO

import click

from agent.verdict.states import Level
from launcher_shim.pod.delivery import printable

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

NARROW = 60
"""A terminal with fewer columns has no room for the full indent."""

NARROW_INDENT = 2

UNKNOWN_COLUMNS = 80
"""The assumed width of a terminal that does not report its size."""

_QUANTITY = re.compile(r"(\d) (s|ms|MB)\b")


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


def wrapped(text: str, stream: IO[str], indent: int) -> str:
    """Wrap one line of ``text`` if ``stream`` is a terminal; ``indent`` is for the later lines."""
    return broken(text, columns_of(stream), indent) if on_terminal(stream) else text


def broken(text: str, columns: int, indent: int) -> str:
    """Wrap one line of ``text`` at ``columns``; a word that is longer than that stays whole."""
    # Keep a number with its unit: textwrap does not break a line at a no-break space.
    made = textwrap.fill(
        _QUANTITY.sub("\\1\N{NO-BREAK SPACE}\\2", text),
        columns,
        subsequent_indent=" " * (indent if columns >= NARROW else NARROW_INDENT),
        break_on_hyphens=False,
        break_long_words=False,
    )
    return made.replace("\N{NO-BREAK SPACE}", " ")


def columns_of(stream: IO[str]) -> int:
    """Return the width of a terminal."""
    told = os.environ.get("COLUMNS", "")
    given = int(told) if told.isdecimal() else 0
    return given or os.get_terminal_size(stream.fileno()).columns or UNKNOWN_COLUMNS


def note(sentence: str) -> None:
    """Print a remark that is not the result."""
    click.echo(f"muster: {printable(sentence)}", err=True)


def remark(kind: Literal["note", "warning", "error"], sentence: str) -> None:
    """Print a remark with its kind, in colour, before it."""
    line = wrapped(f"muster: {kind}: {sentence}", sys.stderr, len("muster: "))
    word = coloured(f"{kind}:", "fault" if kind == "error" else kind, sys.stderr)
    click.echo(line.replace(f"{kind}:", word, 1), err=True)
