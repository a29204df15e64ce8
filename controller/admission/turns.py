# SPDX-License-Identifier: Apache-2.0
"""The order in which pods are planned: a namespace that asks a lot waits for itself alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

PLANNERS = 2
"""Number of plans made at once, of different namespaces. A pod that takes long holds up one of
them, and no request for health, metrics or certificates."""
PLAN_TIMEOUT_S = 1.0
"""Timeout for the plan of one pod. It begins with the plan, not in the queue. The limits on a pod
keep a plan to a tenth of a second of processor time."""
NAMESPACE_MAX_BYTES = 8 * 2**20
"""Limit on a namespace's reviews under way: about a thousand pods of the usual size. Each takes
several times its size of memory, of which the container has 256 MiB."""


class Turns:
    """The planners. Use it within one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(PLANNERS, thread_name_prefix="plan")
        self._free = asyncio.Semaphore(PLANNERS)
        self._of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def under_way(self, namespace: str, size: int) -> Iterator[bool]:
        """Count a review of ``size`` bytes within the context; yield whether it may wait."""
        self._bytes[namespace] += size
        try:
            yield self._bytes[namespace] <= max(NAMESPACE_MAX_BYTES, size)
        finally:
            self._bytes[namespace] -= size
            if not self._bytes[namespace]:
                del self._bytes[namespace]

    async def planned(self, namespace: str, plan: Callable[[], T]) -> T:
        """Run ``plan`` in a thread in its turn; raise ``TimeoutError`` if it takes too long.

        Then it is finished in its thread, for nothing, and only after that is it the turn of the
        next one.
        """
        # A namespace has one review at most in the queue of the semaphore, which is in order.
        own = self._of.setdefault(namespace, asyncio.Lock())
        await own.acquire()
        try:
            await self._free.acquire()
        except BaseException:
            own.release()
            raise
        planned = asyncio.get_running_loop().run_in_executor(self._threads, plan)

        def end(_: asyncio.Future[T]) -> None:
            self._free.release()
            own.release()

        planned.add_done_callback(end)
        async with asyncio.timeout(PLAN_TIMEOUT_S):
            return await asyncio.shield(planned)
