# SPDX-License-Identifier: Apache-2.0
"""The confirmation that the mirror is up to date, for decisions that rest on an absent key.

The stream alone cannot tell: its events may wait unread because this process was suspended, or
unsent because the server was (docs/decisions/rounds.md).
"""

from __future__ import annotations

import asyncio
import logging

from rdzv.errors import StoreError
from rdzv.mirror import HEALTHY_S, Mirror
from rdzv.store import Store

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Confirmation:
    """The confirmation of one mirror, which shows all changes up to ``at_s``, on its clock."""

    def __init__(self, store: Store, mirror: Mirror) -> None:
        self.at_s = float("-inf")
        self._store = store
        self._mirror = mirror
        self._reading = asyncio.Lock()

    async def confirm(self) -> None:
        """Wait until the mirror shows all changes up to now, however long the store is away.

        Makes one linearizable read, which concurrent callers share.
        """
        wanted_s = self._mirror.clock()
        while self.at_s < wanted_s:
            async with self._reading:
                if self.at_s >= wanted_s:
                    return
                asked_s = self._mirror.clock()
                if await self._caught_up():
                    self.at_s = asked_s
                else:
                    await asyncio.sleep(RETRY_S)

    async def _caught_up(self) -> bool:
        """Read the revision and wait for the mirror to reach it; return whether it has."""
        shown_before = self._mirror.revision
        try:
            # Linearizable, and of no key: only the revision counts.
            result = await self._store.range(self._mirror.prefix)
            if result.revision < shown_before:
                # The store was restored or emptied, and the mirror still shows its former state.
                return False
            async with asyncio.timeout(HEALTHY_S):
                await self._mirror.reached(result.revision)
        except (StoreError, TimeoutError) as error:
            why = str(error) or f"the mirror did not follow within {HEALTHY_S:g} s"
            log.debug("a linearizable read failed, retrying: %s", why)
            return False
        return True
