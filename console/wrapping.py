# SPDX-License-Identifier: Apache-2.0
"""Long lines on a terminal: broken at words, and what follows is indented.

Elsewhere each stays one line, as for ``grep``.
"""

from __future__ import annotations

import os
import re
import textwrap
from typing import IO

NARROW = 60
"""On a terminal of fewer columns there is no room for an indent."""

NARROW_INDENT = 2

UNKNOWN_COLUMNS = 80
"""Of a terminal that does not tell its size."""

_QUANTITY = re.compile(r"(\d) (s|ms|MB)\b")


def wrapped(text: str, stream: IO[str], indent: int) -> str:
    """Break one line of ``text`` for ``stream``; ``indent`` is for the lines that follow."""
    return broken(text, _columns(stream), indent) if stream.isatty() else text


def broken(text: str, columns: int, indent: int) -> str:
    """Break one line of ``text`` at ``columns``; a word that is longer than that stays whole."""
    # A number stays with its unit: no-break blanks are none at which a line is broken.
    made = textwrap.fill(
        _QUANTITY.sub("\\1\N{NO-BREAK SPACE}\\2", text),
        columns,
        subsequent_indent=" " * (indent if columns >= NARROW else NARROW_INDENT),
        break_on_hyphens=False,
        break_long_words=False,
    )
    return made.replace("\N{NO-BREAK SPACE}", " ")


def _columns(stream: IO[str]) -> int:
    told = os.environ.get("COLUMNS", "")
    given = int(told) if told.isdecimal() else 0
    return given or os.get_terminal_size(stream.fileno()).columns or UNKNOWN_COLUMNS
