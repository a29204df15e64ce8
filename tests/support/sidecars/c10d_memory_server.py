# SPDX-License-Identifier: Apache-2.0
"""Our server over a store in memory, as a process: prints its port, ends with its input.

A process of its own, for torch's client keeps the interpreter lock in some calls. An argument
names the event loop: ``asyncio`` or ``uvloop``.
"""

from __future__ import annotations

import asyncio
import sys

from launcher_shim.c10d.endpoint import C10dServer
from tests.support.sidecars.c10d_memory import MemorySession, MemoryStore


async def serve() -> None:
    store = MemoryStore()
    server = C10dServer(lambda peer, relay: MemorySession(store), connections_max=1024)
    sys.stdout.write(f"{await server.listen_loopback(0)}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    if sys.argv[1] == "uvloop":
        import uvloop

        uvloop.run(serve())
    else:
        asyncio.run(serve())
