# SPDX-License-Identifier: Apache-2.0
"""Reads every key under a prefix in pages: as much at once as the connection to the store bears.

One answer with all of it would have to come within the deadline of one attempt, and start over if
it does not: on a slow connection, for ever. A page that has come is not read again.
"""

from __future__ import annotations

import asyncio

from rdzv.dataclass import dataclass
from rdzv.errors import StoreUnavailable
from rdzv.store import DEFAULT_TIMEOUT_S, KeyValue, RangeResult, Store

MOST_KEYS = 500
"""Most keys of a page: some 200 KB of a job's records, and most jobs have fewer."""

LEAST_KEYS = 16

LONGEST_S = 8.0
"""Longest timeout of one page, in seconds. An endpoint that is stuck is left after half of it."""

QUICK = 0.25
"""A page that took less than this fraction of its timeout may be larger next time."""


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
