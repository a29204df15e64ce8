# SPDX-License-Identifier: Apache-2.0
"""A torchrun job without its workers: torch's own client, backend and handler in a thread each.

What a store's failure could do to a job it does to these first: they are told to leave their
round, or their connection ends. Importing this imports torch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from tests.support.faults.watch import eventually
from tests.support.sidecars.handlers import handler_at

MONITOR_S = 0.2
FORM_S = 120.0
END_S = 5.0


@dataclass(frozen=True)
class World:
    """A world that an agent was given, and when."""

    round: int
    rank: int
    size: int
    since_s: float


class Agent:
    """What torchrun does between the start and the end of its workers, again and again."""

    def __init__(self, port: int, run_id: str, address: str, nodes: tuple[int, int]) -> None:
        self.worlds: list[World] = []
        self.failure: BaseException | None = None
        self._port, self._run_id, self._address, self._nodes = port, run_id, address, nodes
        self._ended = threading.Event()
        self._handler: DynamicRendezvousHandler | None = None
        self._thread = threading.Thread(target=self._run, name=address, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the thread end at its next look; one that hangs in a request is left. Blocks."""
        self._ended.set()
        self._thread.join(END_S)
        if self._handler is not None:
            self._handler._stop_heartbeats()

    def _run(self) -> None:
        try:
            handler, _ = handler_at(
                self._port, self._address, self._run_id, self._nodes, keep_alive_interval=1
            )
            self._handler = handler
            while not self._ended.is_set():
                info = handler.next_rendezvous()
                number = handler._state_holder.state.round
                self.worlds.append(World(number, info.rank, info.world_size, time.monotonic()))
                while handler.num_nodes_waiting() == 0 and not self._ended.is_set():
                    time.sleep(MONITOR_S)
        except BaseException as failure:
            if not self._ended.is_set():
                self.failure = failure


class Agents:
    """One at each port."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        self._agents = agents

    async def formed(self, size: int) -> None:
        """Wait until all are in one world of this size."""
        formed = await eventually(lambda: self._together(size), FORM_S)
        assert formed, f"{self.faults()} {[agent.worlds for agent in self._agents]}"

    def _together(self, size: int) -> bool:
        newest = [agent.worlds[-1] for agent in self._agents if agent.worlds]
        return (
            len(newest) == size
            and {world.size for world in newest} == {size}
            and len({world.round for world in newest}) == 1
        )

    def worlds(self) -> int:
        """How many worlds there have been."""
        return len({world.round for agent in self._agents for world in agent.worlds})

    def faults(self) -> list[str]:
        """Who has ended; and two agents that were given one rank of one round."""
        told = [f"{one._address}: {one.failure!r}" for one in self._agents if one.failure]
        seats = [(w.round, w.rank) for agent in self._agents for w in agent.worlds]
        if len(set(seats)) < len(seats):
            told.append(f"a seat was given twice: {sorted(seats)}")
        return told

    def end(self) -> None:
        for agent in self._agents:
            agent.end()


@asynccontextmanager
async def agents(
    ports: Sequence[int], run_id: str, nodes: tuple[int, int]
) -> AsyncIterator[Agents]:
    """A job of one agent at each port that has formed its first world."""
    running = Agents(
        [Agent(port, run_id, f"10.0.0.{number}", nodes) for number, port in enumerate(ports)]
    )
    try:
        await running.formed(len(ports))
        yield running
    finally:
        await asyncio.to_thread(running.end)
