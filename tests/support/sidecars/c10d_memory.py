# SPDX-License-Identifier: Apache-2.0
"""A store in memory with the semantics of torch's own TCPStore server, as sessions of ours."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Sequence

from launcher_shim.c10d.values.cell import NotANumber, read_number, wrap_int64
from launcher_shim.tcpstore import wire
from rdzv.errors import WireError


class Waiting:
    """A client that waits until ``missing`` reaches zero."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.released: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def count_down(self) -> bool:
        """Note that a key has come; return whether it was the last."""
        self.missing -= 1
        if self.missing == 0 and not self.released.done():
            self.released.set_result(wire.STOP_WAITING)
            return True
        return False


class MemoryStore:
    """Values, queues and those who wait for them."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.waiting: dict[bytes, list[Waiting]] = defaultdict(list)
        self.at_barrier: dict[bytes, list[Waiting]] = defaultdict(list)

    def has(self, key: bytes) -> bool:
        return key in self.values or key in self.queues

    def put(self, key: bytes, value: bytes) -> None:
        self.values[key] = value
        for waiting in self.waiting.pop(key, ()):
            waiting.count_down()

    def add(self, key: bytes, delta: int) -> int:
        before = self.values.get(key)
        number = wrap_int64((read_number(before) if before is not None else 0) + delta)
        self.put(key, b"%d" % number)
        return number

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        current = self.values.get(key)
        if current is None and expected:
            return expected
        if current is None or current == expected:
            self.put(key, desired)
            return desired
        return current

    def wait(self, keys: tuple[bytes, ...]) -> bytes | Awaitable[bytes]:
        missing = [key for key in keys if not self.has(key)]
        if not missing:
            return wire.STOP_WAITING
        waiting = Waiting(len(missing))
        for key in missing:
            self.waiting[key].append(waiting)
        return waiting.released

    def barrier(self, key: bytes, world_size: int) -> bytes | Awaitable[bytes]:
        if self.add(key, 1) < world_size:
            waiting = Waiting(1)
            self.at_barrier[key].append(waiting)
            return waiting.released
        for waiting in self.at_barrier.pop(key, ()):
            waiting.count_down()
        return wire.STOP_WAITING

    def push(self, key: bytes, value: bytes) -> None:
        self.queues.setdefault(key, deque()).append(value)
        waiting = self.waiting.get(key, [])
        while waiting and not waiting.pop(0).count_down():
            pass

    def pop(self, key: bytes) -> bytes:
        queue = self.queues.get(key)
        if not queue:
            return wire.popped(0, b"")
        length = len(queue)
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return wire.popped(length, value)


class MemorySession:
    """One connection to a ``MemoryStore``."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.is_closed = False
        self.whole: dict[bytes, bytes] = {}

    def keep(self, data: bytes, requests: Sequence[wire.Request]) -> None:
        pass

    def closed(self) -> None:
        self.is_closed = True

    def handle(self, request: wire.Request) -> bytes | Awaitable[bytes]:
        store = self.store
        match request:
            case wire.Get(key):
                return wire.vec(store.values.get(key, b""))
            case wire.Wait(keys):
                return store.wait(keys)
            case wire.Check(keys):
                return wire.READY if all(map(store.has, keys)) else wire.NOT_READY
            case wire.CompareSet(key, expected, desired):
                return wire.vec(store.compare_set(key, expected, desired))
            case wire.Set(key, value):
                store.put(key, value)
            case wire.Append(key, value):
                store.put(key, store.values.get(key, b"") + value)
            case wire.MultiSet(items):
                for key, value in items:
                    store.put(key, value)
            case wire.QueuePush(key, value):
                store.push(key, value)
            case wire.Add(key, delta):
                try:
                    return wire.i64(store.add(key, delta))
                except NotANumber as error:
                    raise WireError(str(error)) from error
            case wire.NumKeys():
                return wire.i64(len(store.values))
            case wire.DeleteKey(key):
                return wire.i64(int(store.values.pop(key, None) is not None))
            case wire.MultiGet(keys):
                return wire.multi_get([store.values.get(key, b"") for key in keys])
            case wire.QueuePop(key):
                return store.pop(key)
            case wire.QueueLen(key):
                return wire.i64(len(store.queues.get(key, ())))
            case wire.ListKeys():
                return wire.key_list(list(store.values))
            case wire.Barrier(key, world_size):
                return store.barrier(key, world_size)
        return b""
