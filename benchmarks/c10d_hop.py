# SPDX-License-Identifier: Apache-2.0
"""Helper process: one etcd transaction behind the same hop as a sidecar's writes.

It listens as a sidecar does and makes one transaction, a compare and a put, per message, whatever
its content. That is the lower bound for a write through another process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import cast

import uvloop

from rdzv.store import Compare, Put
from rdzv.store.etcd.client import EtcdStore

HELLO_BYTES = 10
PONG = b"\x01\x02\x03\x04"
"""The payload of the load generator's ping, which it sends after each SET."""

KEY = "/bench/hop"
VALUE = b"v" * 64


class Hop(asyncio.Protocol):
    """One connection of the load generator."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store
        self._revision = 0
        self._greeted = False
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._greeted:
            self._greeted = True
            self._transport.write(data[HELLO_BYTES - len(PONG) : HELLO_BYTES])
            return
        task = asyncio.ensure_future(self._write())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self) -> None:
        result = await self._store.txn(
            (Compare(KEY, "mod", "=", self._revision),), (Put(KEY, VALUE),)
        )
        if not result.succeeded:
            # Another connection wrote before this one: repeat without the compare, once.
            result = await self._store.txn((), (Put(KEY, VALUE),))
        self._revision = result.revision
        if not self._transport.is_closing():
            self._transport.write(PONG)


async def main() -> None:
    """Answer the only order, and serve until the input ends."""
    loop = asyncio.get_running_loop()
    order = json.loads(await asyncio.to_thread(sys.stdin.readline))
    store = EtcdStore([order["endpoint"]])
    server = await loop.create_server(lambda: Hop(store), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1], "pid": os.getpid()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()
    await store.close()


if __name__ == "__main__":
    uvloop.run(main())
