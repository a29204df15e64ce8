# SPDX-License-Identifier: Apache-2.0
"""Log lines of the programs in a training container: each is one line, whatever came into it.

What the sidecar says may quote another pod, and the container's log is read by people.
"""

from __future__ import annotations

import logging
import sys


class OneLine(logging.Formatter):
    """Names the program, and spells control characters out."""

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
    """Text from elsewhere must neither look like lines of ours nor steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
