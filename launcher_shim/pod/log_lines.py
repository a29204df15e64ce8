# SPDX-License-Identifier: Apache-2.0
"""Log lines of the programs in a training container: each is one line, whatever it contains.

The sidecar's sentences may quote another pod, and people read the container's log.
"""

from __future__ import annotations

import logging
import sys


class OneLine(logging.Formatter):
    """A formatter that names the program, and escapes control characters."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        """Render one record; a traceback that follows it is our own text."""
        text = "%s: %s" % (self._program, printable(record.getMessage()))
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def configure(program: str) -> None:
    """Send the log lines of ``program`` to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(program))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def printable(text: str) -> str:
    """Escape control characters: foreign text must neither fake log lines nor steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
