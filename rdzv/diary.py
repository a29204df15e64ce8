# SPDX-License-Identifier: Apache-2.0
"""A log that writes a sentence when it changes, not each time that it is true."""

from __future__ import annotations

import logging
from collections.abc import Mapping


class Diary:
    """The log of one condition's changes. ``last``: the newest sentence; empty before the first."""

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
        """Forget the last sentence, so that the next one is logged in any case."""
        self._topic = self.last = ""
