# SPDX-License-Identifier: Apache-2.0
"""A bad line to one store member, in user space: delay, jitter, and what loss does to TCP.

Kernels without ``sch_netem`` cannot lose packets on purpose. A lost segment shows to TCP's users
as a pause, of its retransmission time at least, before it and all after it arrive; that is made.
"""

from __future__ import annotations

import asyncio
from random import Random

from tests.support.store.tcp_proxy import TcpProxy

RETRANSMISSION_S = 0.2
"""Linux waits no less before it sends a lost segment again; here, above the round trip."""


class Link(TcpProxy):
    """A proxy whose bytes may take their time, each direction in order."""

    def __init__(self, target: str, random: Random) -> None:
        super().__init__(target)
        self._random = random
        self._delays_s = (0.0, 0.0)
        self._loss = 0.0
        self.chunks = 0
        """How many have come in so far, from both sides."""

    def slow(self, delay_s: float, jitter_s: float, loss: float) -> None:
        """Delay each chunk on its way up and down, and stall a share of them."""
        self._delays_s = (delay_s - jitter_s, delay_s + jitter_s)
        self._loss = loss

    def quick(self) -> None:
        """Take no time any more."""
        self._delays_s, self._loss = (0.0, 0.0), 0.0

    def mend(self) -> None:
        super().mend()
        # Called by the constructor of the base, too, before there is anything to undo.
        if hasattr(self, "_loss"):
            self.quick()

    def _delay_s(self) -> float:
        delay_s = self._random.uniform(*self._delays_s)
        if self._random.random() < self._loss:
            delay_s += RETRANSMISSION_S + 2 * self._delays_s[1]
        return delay_s

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, flow: asyncio.Event
    ) -> None:
        """Pass chunks on when each is due; many may be on their way at once."""
        loop = asyncio.get_running_loop()
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def arrive() -> None:
            while True:
                due_s, chunk = await on_the_way.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                await flow.wait()
                if not chunk:
                    return
                sink.write(chunk)
                await sink.drain()

        arriving = asyncio.create_task(arrive())
        due_s = 0.0
        try:
            while not arriving.done():
                chunk = await source.read(65536)
                self.chunks += 1
                due_s = max(due_s, loop.time() + self._delay_s())
                on_the_way.put_nowait((due_s, chunk))
                if not chunk:
                    break
            await arriving
        except OSError:
            pass
        finally:
            arriving.cancel()
            sink.transport.abort()
            self._writers.discard(sink)
