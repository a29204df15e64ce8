# SPDX-License-Identifier: Apache-2.0
"""One job in one store, as a client sees it: the mirror of its keys and what feeds and reads it.

The store is read once at start and after a compaction, in pages, as much at once as the connection
to the store bears; then the watch follows it. One answer with all of it would have to come within
the deadline of one attempt, and start over if it does not: on a slow connection, for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from random import Random

from rdzv.dataclass import dataclass
from rdzv.errors import Compacted, LeaseLost, StoreError, StoreRefused, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.membership import Membership
from rdzv.mirror import HEALTHY_S, SEE_S, Mirror, PagedRead, Paging
from rdzv.pacing import Doubling
from rdzv.records.job import HistoryEntry, entry_operations
from rdzv.sentences import Diary
from rdzv.store import Compare, KeyValue, Operation, Range, Store, TxnResult

log = logging.getLogger(__name__)

RELIST_PAUSE = Doubling(0.5, 2.0)
"""Backoff between two attempts to read the store, in seconds. Pages read so far are kept."""

PAST_S = 0.01
"""Margin after the end of health at which it is checked, in seconds: a timer may fire a moment
early."""

GATHER_S = 0.25
"""Pause of ``Watching`` with ``gathers`` beside a busy store, unless a reader waits for a revision.
Shorter: each revision costs a message. Longer: the mirror is further behind."""


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


class Watching:
    """The watch that keeps a ``Mirror`` up to date for as long as it runs.

    ``trouble`` is the store's last error, as long as it cannot be read. ``random`` draws the jitter
    of the backoff, so that many do not come back at one moment; without it there is none.
    ``gathers``: whether events of a busy store may come ``GATHER_S`` later, many at once.
    """

    def __init__(
        self,
        store: Store,
        mirror: Mirror,
        *,
        random: Random | None = None,
        pause: Doubling = RELIST_PAUSE,
        gathers: bool = False,
    ) -> None:
        self.trouble = ""
        self._diary = Diary(log)
        self._answered = asyncio.Event()
        self._store = store
        self._mirror = mirror
        self._random = random
        self._pause = pause
        self._gather = partial(mirror.waited_for, GATHER_S) if gathers else None
        self._paging = Paging()

    async def run(self) -> None:
        """Follow the store until cancelled: list, watch, and list again after a compaction."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_following(), name="follow the store")
            tasks.create_task(self._keep_listening(), name="listen for the store's silence")

    async def _keep_following(self) -> None:
        failures = 0
        while True:
            listed = False
            try:
                await self._relist()
                listed, failures = True, 0
                await self._follow()
            except Compacted as gone:
                log.info("reading the whole store again: %s", gone)
                if listed:
                    continue
            except StoreError as error:
                self._note_trouble(error)
            await self._rest(failures)
            failures += 1

    async def _rest(self, failures: int) -> None:
        pause, random = self._pause, self._random
        pause_s = pause.drawn_after(failures, random) if random else pause.after(failures)
        await asyncio.sleep(pause_s)

    async def _keep_listening(self) -> None:
        """Log when the stream falls silent, as a driver bridges an outage without an error."""
        await self._mirror.changed_after(0)
        while True:
            if (left_s := self._mirror.unhealthy_in_s(self._mirror.clock())) > 0:
                await asyncio.sleep(left_s + PAST_S)
                continue
            self._answered.clear()
            if not self._diary.last:
                self._log_trouble(
                    "does not answer", f"nothing has come from it for {HEALTHY_S:g} s"
                )
            await self._answered.wait()

    def _note_trouble(self, error: StoreError) -> None:
        refused = isinstance(error, StoreRefused)
        self._log_trouble("refuses" if refused else "does not answer", str(error))

    def _log_trouble(self, what: str, why: str) -> None:
        """Log that the store is away, once for each ``what``; ``why`` may differ each time."""
        self.trouble = why
        sentence = f"the store {what}, the last snapshot stays in force: {why}"
        self._diary.say(sentence, level=logging.WARNING, topic=what)

    def _note_answer(self) -> None:
        self._answered.set()
        if self._diary.last:
            self.trouble = ""
            self._diary.forget()
            log.info("the store answers again")

    async def _relist(self) -> None:
        """Read everything, page by page; retry a page that does not come."""
        read = PagedRead(self._mirror.prefix, self._paging)
        failures = 0
        while not read.whole:
            try:
                await read.step(self._store)
            except StoreUnavailable as error:
                self._note_trouble(error)
                await self._rest(failures)
                failures += 1
            self._paging = read.paging
        self._mirror.replace(read.kvs, read.revision)
        self._note_answer()

    async def _follow(self) -> None:
        start = self._mirror.revision + 1
        batches = self._store.watch(self._mirror.prefix, start, rest=self._gather)
        async with aclosing(batches):
            async for batch in batches:
                self._mirror.apply(batch.events, batch.revision)
                self._note_answer()


@dataclass(frozen=True, slots=True)
class Registered:
    """The registration of this sidecar's member."""

    member_key: str
    """The store key of its record."""
    lease: Callable[[], int | None]
    """A function that returns its present lease, None while it is not registered. It is called for
    each write: after a loss the sidecar registers again, and pending writes use the new lease."""
    again: Callable[[], Awaitable[object]]
    """A function that waits until it is registered."""

    def holds(self) -> Compare:
        """Return the compare that holds while this sidecar is registered under its name.

        Raises ``LeaseLost`` if it is known not to be.
        """
        lease = self.lease()
        if lease is None:
            raise LeaseLost("the member is not registered")
        return Compare(self.member_key, "lease", "=", lease)

    def fence(self) -> tuple[Compare, ...] | None:
        """Return the compares that hold while it is registered; None while it is known not to."""
        return None if self.lease() is None else (self.holds(),)

    def look(self) -> Range:
        """Return the read of the member record; ``check`` takes the answer."""
        return Range(self.member_key)

    def check(self, kvs: Iterable[KeyValue]) -> None:
        """Raise ``LeaseLost`` if the guard does not hold by the read member record."""
        if self.lease() not in [kv.lease for kv in kvs]:
            raise LeaseLost("the member record is gone, or on another lease")


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
