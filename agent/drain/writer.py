# SPDX-License-Identifier: Apache-2.0
"""Transactions of this member: each requires its registration, and waits for the watch."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from random import Random
from time import time

from rdzv.diary import Diary
from rdzv.drain.inputs import LiveRound
from rdzv.errors import StoreError
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.records.history import Happening, HistoryEntry
from rdzv.store import Compare, Operation, Put

log = logging.getLogger(__name__)

PAUSE_S = (0.2, 0.5)
"""Backoff after a transaction that failed, or that lost a race for the second time in a row, in
seconds (least, most)."""


class DrainWriter:
    """The writer of one member's transactions about drains, while it is registered.

    ``answered_s``: when the store last answered one, by ``clock``; minus infinity before the first.
    """

    def __init__(
        self,
        client: JobClient,
        registrar: Registrar,
        random: Random,
        clock: Callable[[], float],
    ) -> None:
        self.answered_s = -math.inf
        self._clock = clock
        self._client = client
        self._registrar = registrar
        self._random = random
        self._lost_before = False
        self._turn_s: float | None = None
        self.diary = Diary(log)
        """The log of failed writes about drains: one sentence until another follows."""

    def turn_in_s(self, round: LiveRound | None, stagger_s: tuple[float, float]) -> float:
        """Return the seconds until it is this sidecar's turn to write what is due; 0 or less: now.

        The first member of the round writes it at once, the others after a random time between
        those of ``stagger_s``, if it is still due: until ``turn_over``.
        """
        if self._turn_s is None:
            self._turn_s = self._clock() + self._random.uniform(*stagger_s)
        first = next((m for m in round.members if m not in round.left), None) if round else None
        if first in (None, self._registrar.identity.member):
            return 0.0
        return self._turn_s - self._clock()

    def turn_over(self) -> None:
        """Note that nothing is due any more."""
        self._turn_s = None

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        """Execute the transaction once; return whether it was certainly written.

        Whatever its outcome, the mirror shows it before this returns, unless the watch lags or the
        store is away: then decide again from the mirror. The compares make a retry harmless.
        """
        generation = self._registrar.generation
        if generation is None:
            await self._pause()
            return False
        guarded = [*compares, *self._registered(generation)]
        try:
            result = await self._client.store.txn(guarded, list(operations))
        except StoreError as error:
            self.diary.say(f"retrying a write about a drain: {error}")
            await self._pause()
            return False
        self.answered_s = self._clock()
        await self._client.mirror.shown(result.revision)
        # After one loss the mirror shows the winner. Back off after a second in a row, as this
        # sidecar may lose every time.
        if not result.succeeded and self._lost_before:
            await self._pause()
        self._lost_before = not result.succeeded
        return result.succeeded

    async def probe(self) -> None:
        """Ask the store whether it takes writes, for ``answered_s``; write nothing.

        A transaction that could put something needs the right, the space and the quorum for that,
        also where its compares never hold. It makes no revision, so that no watch hears of it.
        """
        key = self._client.keys.probe(self._registrar.identity.member)
        never = [Compare(key, "version", "<", 0)]
        try:
            await self._client.store.txn(never, [Put(key, b"")])
        except StoreError as error:
            self.diary.say(f"the store takes no writes: {error}")
            return
        self.answered_s = self._clock()

    def history(
        self, what: Happening, member: str, why: str, details: dict[str, object]
    ) -> tuple[Operation, ...]:
        """Return the operations that write an entry."""
        return self._client.history(HistoryEntry(what, member, why, time(), details))

    def _registered(self, generation: int) -> list[Compare]:
        return [self._registrar.guard(generation).holds()]

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(*PAUSE_S))
