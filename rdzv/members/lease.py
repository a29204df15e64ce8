# SPDX-License-Identifier: Apache-2.0
"""The lease that a registration hangs on: granted, and renewed until it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

from rdzv.errors import LeaseLost, StoreError
from rdzv.store import Store

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.3
RENEWALS_PER_TTL = 3
RENEWAL_JITTER = 0.1
"""Fraction of the interval by which it varies: sidecars that register in the same second would
otherwise renew at the same moments for ever."""


class MemberLease:
    """One lease of ``ttl_s``, which is whole: the store counts in seconds.

    ``clock`` is monotonic, in seconds; ``valid_until_s`` and ``renewed_s`` are on it. ``former_id``
    is that of a lease which another process was granted; without one, it has an id of its own.
    """

    def __init__(
        self,
        store: Store,
        ttl_s: float,
        clock: Callable[[], float],
        random: Random,
        *,
        former_id: int = 0,
    ) -> None:
        self.id = former_id or random.getrandbits(62) + 1
        self.valid_until_s = float("-inf")
        self.renewed_s = float("-inf")
        self._store = store
        self._ttl_s = ttl_s
        self._clock = clock
        self._random = random
        self._asked_for = False

    async def begin(self) -> None:
        """Grant the lease, or renew it if that was asked for already; may be repeated.

        It then lives for its full TTL from now on. Raises ``StoreError``.
        """
        if self._asked_for:
            asked_at_s = self._clock()
            try:
                await self._store.lease_keep_alive(self.id)
                self.valid_until_s = asked_at_s + self._ttl_s
                return
            except LeaseLost as error:
                log.debug("it ended before the registration was written: %s", error)
        asked_at_s = self._clock()
        self._asked_for = True
        await self._store.lease_grant(self.id, round(self._ttl_s))
        self.valid_until_s = asked_at_s + self._ttl_s

    async def renew(self, complain: Callable[[str], None], *, at_once: bool = False) -> None:
        """Renew the lease until it is lost; ``complain`` is called with the reason of a failure.

        A failure is retried soon: less than another interval may be left of the TTL. ``at_once``:
        it was granted some time ago, and may be about to end.
        """
        interval_s = self._ttl_s / RENEWALS_PER_TTL
        pause_s = 0.0 if at_once else self._jittered_s(interval_s)
        while True:
            await asyncio.sleep(pause_s)
            sent_at_s = self._clock()
            try:
                ttl_s = await self._store.lease_keep_alive(self.id, timeout_s=interval_s)
            except LeaseLost:
                return
            except StoreError as error:
                # Retry refusals, too: rights and passwords may come back, and if not, the lease
                # expires.
                complain(f"the lease could not be renewed, retrying: {error}")
                pause_s = RETRY_PAUSE_S
            else:
                self.renewed_s = sent_at_s
                self.valid_until_s = sent_at_s + ttl_s
                pause_s = self._jittered_s(interval_s)

    def _jittered_s(self, interval_s: float) -> float:
        return interval_s * self._random.uniform(1 - RENEWAL_JITTER, 1 + RENEWAL_JITTER)
