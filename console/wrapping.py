# SPDX-License-Identifier: Apache-2.0
"""Wrapping of long lines on a terminal: at word boundaries, with a hanging indent.

Output to anything else keeps each line whole, as for ``grep``.
"""

from __future__ import annotations

import os
import re
import textwrap
from typing import IO

from console.style import on_terminal

NARROW = 60
"""A terminal with fewer columns has no room for the full indent."""

NARROW_INDENT = 2

UNKNOWN_COLUMNS = 80
"""The assumed width of a terminal that does not report its size."""

_QUANTITY = re.compile(r"(\d) (s|ms|MB)\b")


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
