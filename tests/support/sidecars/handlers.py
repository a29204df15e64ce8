# SPDX-License-Identifier: Apache-2.0
"""torch's own rendezvous handlers at an endpoint."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
)

RUN_ID = "digits"


PATIENCE_S = 90.0
"""For torch's side of a rendezvous, on cores that are shared."""


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
