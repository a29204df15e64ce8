# SPDX-License-Identifier: Apache-2.0
"""One job in one store, as a client sees it: the mirror of its keys and what feeds and reads it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

from rdzv.dataclass import dataclass
from rdzv.errors import StoreError
from rdzv.keys import JobKeys
from rdzv.membership import Membership
from rdzv.mirror import HEALTHY_S, SEE_S, Mirror, Watching
from rdzv.records.history import HistoryEntry, entry_operations
from rdzv.store import Compare, Operation, Store, TxnResult

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


@dataclass(frozen=True, slots=True)
class JobClient:
    """The store, the keys and the mirror of one job, with what feeds and reads the mirror.

    ``mirror`` is empty before ``watching`` runs.
    """

    store: Store
    keys: JobKeys
    mirror: Mirror
    membership: Membership
    watching: Watching
    confirmation: Confirmation

    @classmethod
    def of(
        cls,
        store: Store,
        keys: JobKeys,
        *,
        clock: Callable[[], float],
        random: Random | None = None,
    ) -> JobClient:
        """Build the client of one job. ``clock`` is monotonic, in seconds."""
        mirror = Mirror(keys.prefix, clock)
        return cls(
            store=store,
            keys=keys,
            mirror=mirror,
            membership=Membership(keys, mirror),
            watching=Watching(store, mirror, random=random),
            confirmation=Confirmation(store, mirror),
        )

    @property
    def confirmed_s(self) -> float:
        """The time up to which the mirror is known to show all changes, on its clock in seconds."""
        return self.confirmation.at_s

    async def confirm(self) -> None:
        """Wait until the mirror shows all changes up to now; see ``Confirmation``."""
        await self.confirmation.confirm()

    async def commit(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Operation],
        *,
        see_s: float = SEE_S,
    ) -> TxnResult:
        """Write one transaction; return its result once the mirror shows what came of it.

        If the watch lags by more than ``see_s``, it returns before. Raises ``StoreError``.
        """
        result = await self.store.txn(compares, operations)
        await self.mirror.shown(result.revision, see_s)
        return result

    def history(self, *entries: HistoryEntry) -> tuple[Operation, ...]:
        """Return operations that write ``entries`` into the job's history and delete old ones."""
        present = [kv.key for kv in self.mirror.under(self.keys.history)]
        operations = (
            one
            for entry in entries
            for one in entry_operations(self.keys, entry, self.mirror.revision, present)
        )
        return tuple(dict.fromkeys(operations))

    async def note(self, entry: HistoryEntry, at_revision: int) -> None:
        """Write an entry that is in no other transaction; try once, as history is worth no more."""
        key = self.keys.history_entry(at_revision, entry.member, entry.what)
        present = [kv.key for kv in self.mirror.under(self.keys.history)]
        operations = entry_operations(self.keys, entry, at_revision, present)
        try:
            await self.store.txn([Compare(key, "create", "=", 0)], operations)
        except StoreError as error:
            log.warning(
                "the history entry %r of %s was not written: %s", entry.what, entry.member, error
            )

    @asynccontextmanager
    async def following(self) -> AsyncIterator[JobClient]:
        """Feed the mirror within the context; yield the client.

        The first read may still be under way: ``mirror.changed_after(0)`` waits for it.
        """
        watching = asyncio.create_task(self.watching.run(), name="watch")
        try:
            yield self
        finally:
            watching.cancel()
            await asyncio.wait([watching])
