# SPDX-License-Identifier: Apache-2.0
"""The mirror of one job's keys, as of one revision of the store.

It applies events as they come, and wakes readers once per batch, however many events that has
(docs/decisions/store-driver.md says why this reads no prefix at each wake-up). The mirror stays
readable while the store is away: that is what keeps a healthy job running.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from rdzv.dataclass import dataclass
from rdzv.errors import StoreUnavailable
from rdzv.keys import ROOT, job_of
from rdzv.store import DEFAULT_TIMEOUT_S, WATCH_PROGRESS_S, KeyValue, RangeResult, Store, WatchEvent

log = logging.getLogger(__name__)

MOST_KEYS = 500
"""Most keys of a page: some 200 KB of a job's records, and most jobs have fewer."""

LEAST_KEYS = 16

LONGEST_S = 8.0
"""Longest timeout of one page, in seconds. An endpoint that is stuck is left after half of it."""

QUICK = 0.25
"""A page that took less than this fraction of its timeout may be larger next time."""

HEALTHY_S = 1.75 * WATCH_PROGRESS_S
"""A stream that has been silent for longer than this proves nothing about absent keys.

Less than the time for which a vanished key must stay away: a stream that hangs just then must not
count as one that would have shown its return.
"""

FOREIGN_KEYS_NAMED_MAX = 8
"""Bound on the keys that Muster has not written which are named in the log."""

SHOWN_KEY_LENGTH = 200

SEE_S = 5.0
"""Longest wait for a write by this sidecar to show: one that a restored store has lost never does.
"""

_NAME = "[A-Za-z0-9_.~%-]+"

_MISSPELLED = re.compile("%(?![0-9A-F]{2})|%(?:2[DE]|3[0-9]|4[1-9A-F]|5[0-9AF]|6[1-9A-F]|7[0-9AE])")
"""An escape that is invalid, or of a character that needs none: one name would have two keys."""

_SPELLED = re.compile(
    rf"{_NAME}(?:/{_NAME})*"
    # Only what launchers store may have an empty name.
    rf"|g/[0-9]+/c10d/{_NAME}/(?:kv/|(?:sum|queue)//{_NAME})"
)

Listener = Callable[[Sequence[WatchEvent]], None]


@dataclass(frozen=True, slots=True)
class Paging:
    """The size of the next page, and its timeout: pure."""

    keys: int = MOST_KEYS
    """The most keys of a page. More: fewer calls for a large job; fewer: a page comes in time on a
    slow connection."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """The timeout of a page, in seconds. Longer: it comes on a slow connection; shorter: a call
    lost in an outage is given up sooner."""

    def after_timeout(self) -> Paging:
        """Return a smaller page, or a longer timeout if no page can be smaller.

        A call lost in an outage is given up at its timeout: the sooner, the earlier a sidecar that
        starts in an outage is back after it.
        """
        if self.keys > LEAST_KEYS:
            return Paging(max(self.keys // 4, LEAST_KEYS), self.timeout_s)
        return Paging(LEAST_KEYS, min(2 * self.timeout_s, LONGEST_S))

    def after_answer(self, took_s: float) -> Paging:
        """Return a larger page after a quick answer, with a timeout that such answers need."""
        keys = 2 * self.keys if took_s < QUICK * self.timeout_s else self.keys
        timeout_s = max(DEFAULT_TIMEOUT_S, took_s / QUICK)
        return Paging(min(keys, MOST_KEYS), min(timeout_s, self.timeout_s))


class PagedRead:
    """One read of every key under ``prefix``, as of one revision. Create it in an event loop."""

    def __init__(self, prefix: str, paging: Paging | None = None) -> None:
        self.paging = Paging() if paging is None else paging
        self.kvs: list[KeyValue] = []
        self.revision = 0
        self.whole = False
        self._prefix = prefix
        self._clock = asyncio.get_running_loop().time

    async def step(self, store: Store, longest_s: float = LONGEST_S) -> None:
        """Read the next page; it may be called again after a failure.

        Raises ``StoreUnavailable``; ``Compacted`` and ``StoreRefused`` if this read cannot be
        completed: the revision is gone, or the store is another one.
        """
        began_s, timeout_s = self._clock(), min(self.paging.timeout_s, longest_s)
        try:
            page = await store.page(
                self._prefix,
                after=self.kvs[-1].key if self.kvs else "",
                revision=self.revision,
                limit=self.paging.keys,
                timeout_s=timeout_s,
            )
        except StoreUnavailable:
            if self._clock() - began_s >= timeout_s / 2:
                self.paging = self.paging.after_timeout()
            raise
        self.paging = self.paging.after_answer(self._clock() - began_s)
        self.kvs += page.kvs
        self.revision = page.revision
        self.whole = not page.more


async def read_all(store: Store, prefix: str, *, timeout_s: float) -> RangeResult:
    """Read every key under ``prefix`` once, within ``timeout_s``.

    Raises ``StoreUnavailable`` at the deadline, and what else ``PagedRead.step`` raises.
    """
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    read = PagedRead(prefix)
    while not read.whole:
        try:
            await read.step(store, max(deadline_s - clock(), 0.001))
        except StoreUnavailable:
            if clock() >= deadline_s:
                raise
    return RangeResult(read.revision, tuple(read.kvs))


def spelled(below_prefix: str) -> bool:
    """Return whether a key, given without its job's prefix, may be one of this layout at all.

    A client with rights may write others, of any bytes, and to parse such a key may raise. A name
    counts only in the spelling of ``rdzv.keys``.
    """
    if _SPELLED.fullmatch(below_prefix) is None:
        return False
    return "%" not in below_prefix or _MISSPELLED.search(below_prefix) is None


def spelled_of_any_job(below_root: str) -> bool:
    """Return whether a key, given without ``ROOT``, may be one of a job's at all."""
    found = job_of(ROOT + below_root)
    return found is not None and spelled(found[1])


class Mirror:
    """Every key under one prefix, as of one revision. Only ``Watching`` writes to it.

    ``certain_revision``: the revision of the newest read or event. Compares of the kind "nothing
    has changed since" use this one: ``revision`` may come from a progress notification, which some
    versions of etcd send too early. A revision that is too low is safe: the compare just fails.
    Keys that cannot be ours are left out, and so are those that no part here reads: ``may_be_ours``
    and ``read`` judge by what follows the prefix.
    ``listener_errors`` counts exceptions of listeners, ``relists`` full reads: after one, listeners
    get the differences, and not every change in between.
    """

    def __init__(
        self,
        prefix: str,
        clock: Callable[[], float],
        may_be_ours: Callable[[str], bool] = spelled,
        read: Callable[[str], object] | None = None,
    ) -> None:
        self.prefix = prefix
        self._may_be_ours = may_be_ours
        self._read = read
        self.revision = self.certain_revision = 0
        self.sequence = 0
        self.listener_errors = 0
        self.relists = 0
        self.clock = clock
        self._foreign_keys: set[str] = set()
        self._kvs: dict[str, KeyValue] = {}
        self._last_proof_s = float("-inf")
        self._healthy_since_s = float("inf")
        self._listeners: list[Listener] = []
        self._changed = asyncio.Event()
        self._waiting = 0
        self._waited_for = asyncio.Event()

    @property
    def kvs(self) -> Mapping[str, KeyValue]:
        """The mirrored keys; use them before the next await, or copy them."""
        return self._kvs

    @property
    def loaded(self) -> bool:
        """Whether the first read has been done."""
        return self.revision > 0

    def under(self, prefix: str) -> list[KeyValue]:
        """Return all keys that start with ``prefix``."""
        return [kv for key, kv in self._kvs.items() if key.startswith(prefix)]

    def healthy_for_s(self, now: float) -> float:
        """Return for how many seconds the stream has worked without a gap; 0 while it does not."""
        if now - self._last_proof_s > HEALTHY_S:
            return 0.0
        return max(0.0, now - self._healthy_since_s)

    def healthy(self, now: float) -> bool:
        """Return whether the mirror is known to be up to date, give or take seconds."""
        return now - self._last_proof_s <= HEALTHY_S

    def unhealthy_in_s(self, now: float) -> float:
        """Return the seconds until the stream has been silent for too long; negative if it has."""
        return self._last_proof_s + HEALTHY_S - now

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` synchronously with each batch of changes, in order.

        Returns a function that ends the subscription. A listener that raises has a defect: it is
        logged and counted, the batch is given to it again one event at a time, and no other one is
        disturbed.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def changed_after(self, sequence: int) -> None:
        """Wait until ``self.sequence`` has passed ``sequence``: it grows with each change.

        Not by revision: that of a store restored from a backup goes back.
        """
        while self.sequence <= sequence:
            await self._changed.wait()

    async def reached(self, revision: int) -> None:
        """Wait until the mirror shows ``revision``, for example that of one's own write."""
        self._waiting += 1
        self._waited_for.set()
        try:
            while self.revision < revision:
                await self._changed.wait()
        finally:
            self._waiting -= 1

    async def waited_for(self, timeout_s: float) -> None:
        """Wait until a reader waits for a revision, for ``timeout_s`` at most."""
        if self._waiting:
            return
        self._waited_for.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._waited_for.wait()

    async def shown(self, revision: int, see_s: float = SEE_S) -> None:
        """Wait until the mirror shows an own write at ``revision``, for ``see_s`` at most."""
        try:
            async with asyncio.timeout(see_s):
                await self.reached(revision)
        except TimeoutError:
            log.info("the watch is stale, more than %.0f s behind the store", see_s)

    def replace(self, kvs: Sequence[KeyValue], revision: int) -> None:
        """Take a full read as the new content; pass the difference to listeners as events."""
        new = {kv.key: kv for kv in kvs if self._is_kept(kv.key)}
        events = [
            WatchEvent("delete", KeyValue(key, b"", 0, revision, 0, 0))
            for key in self._kvs
            if key not in new
        ]
        events += [
            WatchEvent("put", kv)
            for key, kv in new.items()
            if (old := self._kvs.get(key)) is None or old != kv
        ]
        self._kvs = new
        self.certain_revision = revision
        self.relists += 1
        self._advance(events, revision)

    def apply(self, events: Sequence[WatchEvent], revision: int) -> None:
        """Apply one batch of the watch."""
        if events:
            self.certain_revision = events[-1].kv.mod_revision
        events = [event for event in events if self._is_kept(event.kv.key)]
        for event in events:
            if event.kind == "put":
                self._kvs[event.kv.key] = event.kv
            else:
                self._kvs.pop(event.kv.key, None)
        self._advance(events, revision)

    def _advance(self, events: Sequence[WatchEvent], revision: int) -> None:
        now = self.clock()
        if now - self._last_proof_s > HEALTHY_S:
            self._healthy_since_s = now
        self._last_proof_s = now
        moved = revision != self.revision
        self.revision = revision
        self.sequence += 1 if moved or events else 0
        if events:
            self._notify(events)
        if moved or events:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _notify(self, events: Sequence[WatchEvent]) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(events)
            except Exception:
                # One event at a time: the listener does not lose those that came with the one that
                # it fails on.
                borne = [self._notify_of_one(listener, event) for event in events]
                if all(borne):
                    self._note_defect(listener, f"a batch of {len(events)} events")

    def _notify_of_one(self, listener: Listener, event: WatchEvent) -> bool:
        try:
            listener((event,))
        except Exception:
            self._note_defect(listener, f"the {event.kind} of {shown_key(event.kv.key)}")
            return False
        return True

    def _note_defect(self, listener: Listener, news: str) -> None:
        """Count and log the exception that is being handled."""
        self.listener_errors += 1
        log.exception(
            "a defect of muster: %s failed on %s, and goes on without it",
            getattr(listener, "__qualname__", listener),
            news,
            extra={"event": "listener_failed"},
        )

    def _is_kept(self, key: str) -> bool:
        below = key[len(self.prefix) :]
        if self._read is not None and not self._read(below):
            return False
        if self._may_be_ours(below):
            return True
        if key not in self._foreign_keys and len(self._foreign_keys) < FOREIGN_KEYS_NAMED_MAX:
            self._foreign_keys.add(key)
            last = len(self._foreign_keys) == FOREIGN_KEYS_NAMED_MAX
            more = "; others like it are not named" if last else ""
            log.warning(
                "ignoring a key that Muster has not written: %s%s",
                shown_key(key),
                more,
                extra={"event": "alien_key"},
            )
        return False


def shown_key(key: str) -> str:
    """Render a key, whatever its bytes, for people: one line of bounded length."""
    return ascii(key[:SHOWN_KEY_LENGTH])[1:-1]
