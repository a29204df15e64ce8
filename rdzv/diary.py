# SPDX-License-Identifier: Apache-2.0
"""A log in which a sentence is written when it changes, not each time that it is true."""

from __future__ import annotations

import logging
from collections.abc import Mapping


class Diary:
    """Writes one train of thought into ``log``. ``last`` is what it wrote last; empty: nothing."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._topic = ""
        self.last = ""

    def say(
        self,
        sentence: str,
        *,
        level: int = logging.INFO,
        extra: Mapping[str, object] | None = None,
        topic: str = "",
    ) -> None:
        """Log ``sentence`` unless it is the last one, or about the last ``topic`` if it has one."""
        topic = topic or sentence
        if topic != self._topic:
            self._topic, self.last = topic, sentence
            self._log.log(level, "%s", sentence, extra=extra)

    def forget(self) -> None:
        """Let whatever is said next be new."""
        self._topic = self.last = ""
