# SPDX-License-Identifier: Apache-2.0
"""How late the event loop wakes up: a sidecar that cannot keep time suspects itself first."""

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
"""A third of the usual renewal interval: from here on a lag is worth a line."""


class LoopLag:
    """Measures by how much a sleep of ``PROBE_INTERVAL_S`` is overslept; ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lags: deque[float] = deque([0.0], maxlen=REMEMBERED)

    @property
    def worst_s(self) -> float:
        """The worst lag of the last probes, in seconds."""
        return max(self._lags)

    async def run(self) -> None:
        """Probe until cancelled."""
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
