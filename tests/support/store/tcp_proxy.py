# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that a test can cut, slow down, or turn into a black hole."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class TcpProxy:
    """``async with TcpProxy("127.0.0.1:2379") as proxy: … proxy.endpoint``."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.bytes_per_s = 0.0
        """Of what comes back from the target; 0: as many as there are."""
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._refusing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.mend()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # A task that is cancelled before its first step has closed nothing.
        self.cut()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Reset every connection, and every new one."""
        self._refusing = True
        for writer in self._writers:
            writer.transport.abort()

    def hold(self, *, up: bool = True, down: bool = True) -> None:
        """Black hole: connections stay, bytes towards the target and back do not pass."""
        if up:
            self._up.clear()
        if down:
            self._down.clear()

    def strand(self) -> None:
        """Hold what is connected for good; new connections get through."""
        self.hold()
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self.mend()

    def mend(self) -> None:
        """Let everything through; what was held arrives now, as TCP would have it."""
        self._refusing = False
        self._up.set()
        self._down.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._keep(asyncio.create_task(self._connect(reader, writer)))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            self._close(writer)
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            self._close(writer)
            return
        self._writers.add(far_writer)
        self._keep(asyncio.create_task(self._pump(reader, far_writer, self._up)))
        self._keep(asyncio.create_task(self._pump(far_reader, writer, self._down)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _close(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        self._writers.discard(writer)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, flow: asyncio.Event
    ) -> None:
        try:
            while chunk := await source.read(65536):
                if self.bytes_per_s and flow is self._down:
                    await asyncio.sleep(len(chunk) / self.bytes_per_s)
                await flow.wait()
                sink.write(chunk)
                await sink.drain()
            await flow.wait()
        except OSError:
            pass
        finally:
            self._close(sink)
