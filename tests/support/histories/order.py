# SPDX-License-Identifier: Apache-2.0
"""One history of all keys together: what a client sees never goes back in the store's own order.

Whether each key by itself is right is decided by Porcupine, from what clients saw alone. Between
keys that takes too long to search, but here the store has said in which order it took the writes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

from launcher_shim.tcpstore import wire
from rdzv.keys import RunKeys
from rdzv.store import Range, Store, WatchBatch, WatchEvent
from tests.support.histories.recorded import History, Record
from tests.support.tasks import beside

CATCH_UP_S = 150.0
"""Until the last of what was written has been followed, however busy the machine is."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a key holds from one revision on."""

    revision: int
    value: str | None


@dataclass(slots=True)
class Stored:
    """The store keys of one launcher key: what was set, and what each adder has added since."""

    base: str | None = None
    addends: dict[str, int] = field(default_factory=dict)

    def value(self) -> str | None:
        if not self.addends:
            return self.base
        return str(int(self.base or "0") + sum(self.addends.values()))


class StoreOrder:
    """What each launcher key of a run held, and since which revision of the store.

    It is found from the events by a fold of its own: one that the sidecars used as well would be
    wrong together with them.
    """

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys
        self._stored: dict[str, Stored] = {}
        self._held: dict[str, list[Held]] = {}

    def take(self, batch: WatchBatch) -> None:
        """Take in what the store reports, one revision after the other."""
        by_revision: dict[int, list[WatchEvent]] = {}
        for event in batch.events:
            by_revision.setdefault(event.kv.mod_revision, []).append(event)
        for revision, events in sorted(by_revision.items()):
            folded = {self._fold(event) for event in events}
            for key in (key for key in folded if key is not None):
                told = self._stored[key].value()
                held = self._held.setdefault(key, [])
                if not held or held[-1].value != told:
                    held.append(Held(revision, told))

    def _fold(self, event: WatchEvent) -> str | None:
        """Take one change in; return the launcher key that it is of, if it is of a value."""
        name, value = event.kv.key, event.kv.value.decode(errors="replace")
        if name.startswith(self._keys.kv):
            key = unquote(name.removeprefix(self._keys.kv))
            self._stored.setdefault(key, Stored()).base = value if event.kind == "put" else None
            return key
        if name.startswith(self._keys.sums):
            key, _, adder = name.removeprefix(self._keys.sums).partition("/")
            key = unquote(key)
            addends = self._stored.setdefault(key, Stored()).addends
            if event.kind == "put":
                addends[adder] = int(value)
            else:
                addends.pop(adder, None)
            return key
        return None

    def since(self, key: str, value: str | None, revision: int) -> int | None:
        """The first revision, from ``revision`` on, at which ``key`` held ``value``."""
        held = self._held.get(key, [])
        index = bisect_right(held, revision, key=lambda one: one.revision) - 1
        if index < 0:
            if value is None:
                return revision
            index = 0
        for one in held[index:]:
            if one.value == value:
                return max(one.revision, revision)
        return None

    def first_backward_step(self, history: History) -> str | None:
        """Tell of the first answer that is older than what its client had seen, if there is one."""
        seen: dict[int, int] = {}
        for record in history.records:
            if record.return_ns is None or not _shows(record):
                continue
            known = seen.get(record.client, 0)
            since = self.since(record.key, _shown(record), known)
            if since is None:
                return (
                    f"client {record.client} had seen revision {known} when {record.op} of"
                    f" {record.key} showed {_shown(record)!r}, which it never was since"
                )
            seen[record.client] = since
        return None


def _shows(record: Record) -> bool:
    return record.op in ("get", "add", "delete", "cas") or (
        record.op == "check" and record.output == wire.NOT_READY.decode()
    )


def _shown(record: Record) -> str | None:
    """What the key held when the operation was done."""
    if record.op in ("delete", "check"):
        return None
    if record.op == "cas" and record.output == record.expected != record.value:
        return None  # the native server's answer for a key that is missing
    return record.output


@asynccontextmanager
async def store_order(store: Store, keys: RunKeys) -> AsyncIterator[StoreOrder]:
    """Follow the store itself, past every fault, until all that was written has come."""
    order = StoreOrder(keys)
    start = (await store.range(keys.prefix)).revision + 1
    reached = start - 1
    moved = asyncio.Event()

    async def follow() -> None:
        nonlocal reached
        async for batch in store.watch(keys.prefix, start):
            order.take(batch)
            reached = batch.revision
            moved.set()

    async with beside(follow()):
        yield order
        last = (await store.txn([], [Range(keys.prefix)])).revision
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while reached < last:
                    moved.clear()
                    await moved.wait()
        except TimeoutError:
            raise AssertionError(f"the watch is at {reached}, the store at {last}") from None
