# SPDX-License-Identifier: Apache-2.0
"""The log of connections that the tunnel refused: a bounded number of lines, however many come."""

from __future__ import annotations

import logging
from collections.abc import Callable

PERIOD_S = 60.0
LINES = 10
"""Lines logged in each period; further refusals are only counted."""


class Refusals:
    """The log of refusals, written to ``log``; ``clock`` is monotonic, in seconds."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._since_s = float("-inf")
        self._count = 0

    def tell(self, address: str, why: str) -> None:
        """Log, or only count, the refusal of a connection from ``address``."""
        if self._clock() - self._since_s >= PERIOD_S:
            more = self._count - LINES
            if more > 0:
                self._warn("%d more connections to the tunnel were refused before that", more)
            self._since_s, self._count = self._clock(), 0
        self._count += 1
        if self._count <= LINES:
            self._warn("a connection from %s to the tunnel is refused: %s", address, why)

    def _warn(self, sentence: str, *values: object) -> None:
        self._log.warning(sentence, *values, extra={"event": "tunnel_refused"})
