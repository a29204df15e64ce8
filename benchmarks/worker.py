# SPDX-License-Identifier: Apache-2.0
"""A helper process that takes orders as JSON lines and answers each with one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

LINE_MAX = 16 * 1024 * 1024


class Worker:
    """The process, from the caller's side."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, what: str, timeout_s: float = 60.0, **details: Any) -> Any:
        """Send one order and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **details}).encode() + b"\n")
        async with asyncio.timeout(timeout_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the helper process ended when asked to {what}")
        return json.loads(line)


@asynccontextmanager
async def worker(module: str) -> AsyncIterator[Worker]:
    """Run ``python -m module`` until the end of the block; it ends with its input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_MAX,
    )
    try:
        yield Worker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def serve(obey: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
    """Be such a process: answer each order until the input ends."""
    reader = asyncio.StreamReader(limit=LINE_MAX)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await obey(json.loads(line))), flush=True)
