# SPDX-License-Identifier: Apache-2.0
"""A log in which a sentence is written when it changes, not each time that it is true."""

from __future__ import annotations

import logging
from collections.abc import Mapping


class Diary:
    """Logs the changes of one condition. ``last``: the newest sentence; empty before the first."""

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
        """Log ``sentence``, unless it, or its ``topic`` if given, is the same as last time."""
        topic = topic or sentence
        if topic != self._topic:
            self._topic, self.last = topic, sentence
            self._log.log(level, "%s", sentence, extra=extra)

    def forget(self) -> None:
        """Log the next sentence in any case."""
        self._topic = self.last = ""
