# SPDX-License-Identifier: Apache-2.0
"""The order in which pods are planned: a namespace that asks a lot waits for itself alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

PLANNERS = 2
"""Number of plans made at once, of different namespaces. A pod that takes long holds up one of
them, and no request for health, metrics or certificates."""
PLAN_TIMEOUT_S = 1.0
"""Limit on the processor time of one plan; the limits on a pod keep it to a tenth of a second. The
clock does not count: a busy machine is no reason to admit a pod without Muster."""
LOOK_S = 0.1
"""Minimum interval between two looks at the processor time of a plan."""
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
        timed = _Timed(plan)
        planned = asyncio.get_running_loop().run_in_executor(self._threads, timed)

        def end(done: asyncio.Future[T]) -> None:
            done.exception()  # raised below, if the review still waits
            self._free.release()
            own.release()

        planned.add_done_callback(end)
        while not planned.done():
            left_s = PLAN_TIMEOUT_S - timed.spent_s
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait({planned}, timeout=max(LOOK_S, left_s))
        return planned.result()


class _Timed(Generic[T]):
    """A plan whose processor time can be read while its thread runs it."""

    def __init__(self, plan: Callable[[], T]) -> None:
        self._plan = plan
        self._begun_s = 0.0
        self._clock: int | None = None

    def __call__(self) -> T:
        self._begun_s = time.thread_time()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        return self._plan()

    @property
    def spent_s(self) -> float:
        """The processor time of the plan so far; 0 before it begins."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock) - self._begun_s
