# SPDX-License-Identifier: Apache-2.0
"""torch's own client, backend and handler against a pod's endpoint, over a real socket."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _RendezvousJoinOp,
)

from rdzv.store.memory import MemoryEngine
from tests.contract.test_endpoint import pod

RUN_ID = "digits"


@pytest.fixture(autouse=True)
def _one_worker_store_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def handler_at(port: int, address: str) -> tuple[Any, Any]:
    """Connect as torchrun does; blocks."""
    store = TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=20))
    backend = C10dRendezvousBackend(store, RUN_ID)
    handler = DynamicRendezvousHandler.from_backend(RUN_ID, store, backend, 1, 4, address)
    return handler, store


async def test_two_nodes_share_a_world_and_its_master() -> None:
    engine = MemoryEngine()
    async with pod(engine, "w-0") as one, pod(engine, "w-1") as two:

        def join(port: int, address: str) -> tuple[int, int, str]:
            handler, _ = handler_at(port, address)
            info = handler.next_rendezvous()
            handler._stop_heartbeats()
            return info.rank, info.world_size, info.bootstrap_store_info.master_addr

        joined = await asyncio.gather(
            asyncio.to_thread(join, one.port, "10.0.0.2"),
            asyncio.to_thread(join, two.port, "10.0.0.1"),
        )
        assert sorted(joined) == [(0, 2, "10.0.0.1"), (1, 2, "10.0.0.1")]


async def test_one_whose_first_rank_died_before_it_spoke_comes_back_to_form_again() -> None:
    engine = MemoryEngine()
    async with pod(engine, "w-0") as one, pod(engine, "w-1") as two:

        def join_and_die(port: int) -> None:
            handler, _store = handler_at(port, "10.0.0.1")
            deadline = time.monotonic() + 20
            handler._op_executor.run(_RendezvousJoinOp(), deadline, handler._get_deadline)

        def join(port: int) -> tuple[int, int, float]:
            handler, _ = handler_at(port, "10.0.0.2")
            began = time.monotonic()
            info = handler.next_rendezvous()
            waited_s = time.monotonic() - began
            while handler.num_nodes_waiting() == 0:
                assert time.monotonic() - began < 15
                time.sleep(0.1)
            handler._stop_heartbeats()
            return info.rank, info.bootstrap_store_info.master_port, waited_s

        (rank, port, waited_s), _ = await asyncio.gather(
            asyncio.to_thread(join, one.port), asyncio.to_thread(join_and_die, two.port)
        )
        assert rank == 1
        assert port == 1
        assert waited_s < 10


async def test_i1_torchruns_of_a_former_life_leave_its_world_and_form_one_in_the_next() -> None:
    engine = MemoryEngine()
    moved = threading.Event()
    async with pod(engine, "w-0") as one, pod(engine, "w-1") as two:

        def train(port: int, address: str) -> tuple[int, int]:
            handler, _ = handler_at(port, address)
            handler.next_rendezvous()
            assert moved.wait(20)
            deadline = time.monotonic() + 15
            while handler.num_nodes_waiting() == 0:
                assert time.monotonic() < deadline, "it still believes in its former world"
                time.sleep(0.1)
            info = handler.next_rendezvous()
            handler._stop_heartbeats()
            return info.rank, info.world_size

        async def begin_next_life() -> None:
            async with asyncio.timeout(20):
                while True:
                    run = one.endpoint.rendezvous().get(RUN_ID)
                    if run is not None and run.round.complete:
                        break
                    await one.client.mirror.changed_after(one.client.mirror.sequence)
                job = one.client.membership.snapshot().job
                assert job is not None
                await one.registrar.next_generation(job, "somebody began it behind a cut")
                while {one.registrar.generation, two.registrar.generation} != {2}:
                    await one.client.mirror.changed_after(one.client.mirror.sequence)
            moved.set()

        async with asyncio.timeout(50):
            first, second, _ = await asyncio.gather(
                asyncio.to_thread(train, one.port, "10.0.0.1"),
                asyncio.to_thread(train, two.port, "10.0.0.2"),
                begin_next_life(),
            )
        assert (first, second) == ((0, 2), (1, 2))
        assert one.registrar.generation == 2
