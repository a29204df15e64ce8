# SPDX-License-Identifier: Apache-2.0
"""A log in which a sentence stands when it is new, not each time that it is true."""

from __future__ import annotations

import logging


class Diary:
    """Writes one train of thought into ``log``."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self.last = ""

    def say(self, sentence: str) -> None:
        """Log ``sentence`` unless it is what was said last."""
        if sentence != self.last:
            self.last = sentence
            self._log.info("%s", sentence)
