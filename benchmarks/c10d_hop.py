# SPDX-License-Identifier: Apache-2.0
"""Helper process: one etcd transaction of a client behind the same hop as a sidecar's writes.

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

from benchmarks.store_clients import KEYS, Client, open_client

HELLO_BYTES = 10
PONG = b"\x01\x02\x03\x04"
"""The payload of the load generator's ping, which it sends after each SET."""


class Hop(asyncio.Protocol):
    """One connection of the load generator."""

    def __init__(self, client: Client) -> None:
        self._client = client
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
        # The etcd3 package blocks: in a thread it would be later still.
        writing = self._client.transact(KEYS[0])
        if writing is not None:
            await writing
        if not self._transport.is_closing():
            self._transport.write(PONG)


async def main() -> None:
    """Answer the only order, and serve until the input ends."""
    loop = asyncio.get_running_loop()
    order = json.loads(await asyncio.to_thread(sys.stdin.readline))
    client = open_client(order["name"], order["endpoint"])
    await client.put()
    server = await loop.create_server(lambda: Hop(client), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1], "pid": os.getpid()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()
    await client.close()


if __name__ == "__main__":
    uvloop.run(main())
