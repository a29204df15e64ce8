# SPDX-License-Identifier: Apache-2.0
"""What a fault does to the store's clients: numbered writes, and what each sidecar sees of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, pairwise

from rdzv.errors import StoreError
from rdzv.keys import JobKeys
from rdzv.mirror import Mirror
from rdzv.store import Compare, Put, Store, WatchEvent

WRITE_EVERY_S = 0.1
SWAP_EVERY_S = 0.1
ASK_EVERY_S = 0.1
ASK_S = 0.5
"""For one member's answer; a healthy one needs milliseconds."""

_drills = count(1)


class Health:
    """When the store itself could serve, asked past every client of ours.

    All members at once are asked over plain HTTP, each anew and briefly: one that says it is
    healthy has just read through a quorum, and knows of no alarm that forbids writes.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.served_at_s: list[float] = []
        self._addresses = [url.removeprefix("http://").split(":") for url in urls]

    async def run(self) -> None:
        """Ask for ever."""
        async with asyncio.TaskGroup() as tasks:
            for host, port in self._addresses:
                tasks.create_task(self._ask(host, int(port)))

    async def _ask(self, host: str, port: int) -> None:
        while True:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(ASK_S):
                    if await self._serves(host, port):
                        self.served_at_s.append(time.monotonic())
            await asyncio.sleep(ASK_EVERY_S)

    @staticmethod
    async def _serves(host: str, port: int) -> bool:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            return b'"health":"true"' in await reader.read()
        finally:
            writer.transport.abort()


class Numbers:
    """A writer past every fault but the store's own: one new key after the other."""

    def __init__(self, store: Store, keys: JobKeys) -> None:
        self.prefix = f"{keys.prefix}drill/{next(_drills)}/"
        self.written_at_s: list[float] = []
        self._store = store

    @property
    def count(self) -> int:
        return len(self.written_at_s)

    async def run(self) -> None:
        """Write for ever."""
        while True:
            key = f"{self.prefix}{self.count:08}"
            with suppress(StoreError):
                # A repetition finds its key there, which is as good.
                await self._store.txn([Compare(key, "create", "=", 0)], [Put(key, b"")])
                self.written_at_s.append(time.monotonic())
            await asyncio.sleep(WRITE_EVERY_S)


class Seen:
    """What one sidecar's mirror shows of the numbers."""

    def __init__(self, mirror: Mirror, prefix: str) -> None:
        self.numbers: list[int] = []
        self.at_s: list[float] = []
        self._prefix = prefix
        mirror.subscribe(self._take)

    def _take(self, events: Sequence[WatchEvent]) -> None:
        fresh = [event.kv.key for event in events if event.kv.key.startswith(self._prefix)]
        self.numbers += [int(key.removeprefix(self._prefix)) for key in fresh]
        self.at_s += [time.monotonic()] * len(fresh)

    def lost(self, written: int) -> int:
        return len(set(range(written)) - set(self.numbers))

    def doubled(self) -> int:
        return len(self.numbers) - len(set(self.numbers))

    def out_of_order(self) -> int:
        return sum(later < earlier for earlier, later in pairwise(self.numbers))


class Swaps:
    """A compare-and-set loop of one sidecar's store client: how long nothing can be written."""

    def __init__(self, store: Store, key: str) -> None:
        self.done_at_s: list[float] = []
        self._store = store
        self._key = key

    async def run(self) -> None:
        """Swap for ever."""
        while True:
            with suppress(StoreError):
                kvs = (await self._store.range(self._key)).kvs
                revision = kvs[0].mod_revision if kvs else 0
                swap = [Compare(self._key, "mod", "=", revision)], [Put(self._key, b"")]
                if (await self._store.txn(*swap)).succeeded:
                    self.done_at_s.append(time.monotonic())
            await asyncio.sleep(SWAP_EVERY_S)


@dataclass(frozen=True)
class Drill:
    """A writer past the fault, and the sidecars that see its numbers and write themselves."""

    numbers: Numbers
    seen: Sequence[Seen]
    swaps: Sequence[Swaps]

    def goes_on(self) -> Callable[[], bool]:
        """What tells whether every sidecar has come to see, and do, what is written from now on."""
        goal = self.numbers.count + 5
        swapped = [len(one.done_at_s) + 3 for one in self.swaps]
        return lambda: (
            self.numbers.count >= goal
            and all(one.numbers and one.numbers[-1] >= goal - 1 for one in self.seen)
            and all(
                len(one.done_at_s) >= least for one, least in zip(self.swaps, swapped, strict=True)
            )
        )


async def eventually(what: Callable[[], bool | Awaitable[bool]], timeout_s: float) -> bool:
    """Wait until ``what`` holds; say whether it came to that."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        held = what()
        if not isinstance(held, bool):
            held = await held
        if held or time.monotonic() > deadline_s:
            return held
        await asyncio.sleep(0.05)


def gap_s(moments_s: Iterable[float], since_s: float) -> float:
    """The longest time without one, from ``since_s`` on until now."""
    later = [moment for moment in moments_s if moment > since_s]
    return max(late - early for early, late in pairwise([since_s, *later, time.monotonic()]))
