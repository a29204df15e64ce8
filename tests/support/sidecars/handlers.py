# SPDX-License-Identifier: Apache-2.0
"""torchruns with torch's own rendezvous handlers, at an endpoint."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

RUN_ID = "digits"


PATIENCE_S = 90.0
"""Ends what hangs of torch's side of a rendezvous."""


def handler_at(
    port: int, address: str, run_id: str = RUN_ID, nodes: tuple[int, int] = (1, 4), **options: Any
) -> tuple[Any, Any]:
    """Connect as torchrun does; blocks."""
    store = TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    backend = C10dRendezvousBackend(store, run_id)
    handler = DynamicRendezvousHandler.from_backend(
        run_id, store, backend, *nodes, address, **options
    )
    return handler, store


DONE = "torchelastic/agent/terminal_state/num_members"


class World(NamedTuple):
    """What a torchrun is told of its world."""

    rank: int
    size: int


class Torchrun:
    """One torchrun, from its start on; its methods block."""

    def __init__(self, port: int, address: str = "10.0.0.1", run_id: str = RUN_ID) -> None:
        self._handler, self.store = handler_at(port, address, run_id)

    def form(self) -> World:
        """Form a world."""
        info = self._handler.next_rendezvous()
        self._handler._stop_heartbeats()
        self._keys: Any = info.store
        return World(info.rank, info.world_size)

    def waiting(self) -> int:
        """What the agent looks at beside its workers."""
        return int(self._handler.num_nodes_waiting())

    def end_well(self) -> None:
        """Come to the exit barrier once the workers are done, close the run, and end."""
        self._keys.add(DONE, 1)
        self._handler.shutdown()
        self.end()

    def end(self) -> None:
        """End the process, as far as anybody sees it: the connection closes."""
        self._handler._stop_heartbeats()
        self.__dict__.clear()
