# SPDX-License-Identifier: Apache-2.0
"""The lag of the event loop: a sidecar that is late suspects itself first."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0
REMEMBERED = 10
"""Probes that ``worst_s`` looks back on."""

LOGGED_S = 1.0
"""Lag above which a warning is logged, in seconds: a third of the usual renewal interval."""


class LoopLag:
    """The time by which sleeps of ``PROBE_INTERVAL_S`` are too long; ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lags: deque[float] = deque([0.0], maxlen=REMEMBERED)

    @property
    def worst_s(self) -> float:
        """The worst lag of the last probes, in seconds."""
        return max(self._lags)

    async def run(self) -> None:
        """Measure the lag until cancelled."""
        while True:
            due_s = self._clock() + PROBE_INTERVAL_S
            await asyncio.sleep(PROBE_INTERVAL_S)
            lag_s = max(0.0, self._clock() - due_s)
            self._lags.append(lag_s)
            if lag_s > LOGGED_S:
                log.warning(
                    "the event loop was blocked for %.1f s: the lease may expire, and others may"
                    " count this member as lost",
                    lag_s,
                    extra={"event": "loop_lag", "lag_s": round(lag_s, 3)},
                )
