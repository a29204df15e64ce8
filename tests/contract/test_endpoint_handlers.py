# SPDX-License-Identifier: Apache-2.0
"""torch's own client, backend and handler against a pod's endpoint, over a real socket."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _RendezvousJoinOp,
)

import launcher_shim.c10d.endpoint
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from rdzv.store.memory.client import MemoryEngine
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.handlers import PATIENCE_S, RUN_ID, handler_at
from tests.support.sidecars.jobs import KEYS, begin_next_life


@pytest.fixture(autouse=True)
def _nobody_is_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is let go here is let go for another reason, however long this machine takes for it."""
    policy = partial(RoundPolicy, hung_s=10 * PATIENCE_S)
    monkeypatch.setattr(launcher_shim.c10d.endpoint, "RoundPolicy", policy)


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
            deadline = time.monotonic() + PATIENCE_S
            handler._op_executor.run(_RendezvousJoinOp(), deadline, handler._get_deadline)

        def join(port: int) -> tuple[int, int]:
            handler, _ = handler_at(port, "10.0.0.2")
            info = handler.next_rendezvous()
            deadline = time.monotonic() + PATIENCE_S
            while handler.num_nodes_waiting() == 0:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            handler._stop_heartbeats()
            return info.rank, info.bootstrap_store_info.master_port

        (rank, port), _ = await asyncio.gather(
            asyncio.to_thread(join, one.port), asyncio.to_thread(join_and_die, two.port)
        )
        assert rank == 1
        # The sidecar's word: who is left waiting gets an error of torch's.
        assert port == 1


class Torchrun:
    """One torchrun's handler; its methods block, as torch's do."""

    def __init__(self, port: int, address: str) -> None:
        self._port = port
        self._address = address

    def join_alone(self) -> None:
        """Get into a world, and say nothing there."""
        self._handler, _ = handler_at(self._port, self._address)
        deadline = time.monotonic() + PATIENCE_S
        self._handler._op_executor.run(_RendezvousJoinOp(), deadline, self._handler._get_deadline)

    def form(self) -> tuple[int, int, int]:
        """Form a world: rank, size, and the port that its workers would meet at."""
        self._handler, _ = handler_at(self._port, self._address)
        return self.form_again()

    def form_again(self) -> tuple[int, int, int]:
        """Form the next one."""
        info = self._handler.next_rendezvous()
        return info.rank, info.world_size, info.bootstrap_store_info.master_port

    def form_again_once_told(self) -> tuple[int, int, int]:
        """Poll as the agent's monitor loop does, and follow."""
        deadline = time.monotonic() + PATIENCE_S
        while self._handler.num_nodes_waiting() == 0:
            assert time.monotonic() < deadline, "it still believes in its former world"
            time.sleep(0.1)
        return self.form_again()

    def end(self) -> None:
        """Stop what asks in the background."""
        self._handler._stop_heartbeats()


async def begin_it_and_move(*pods: Pod) -> None:
    """Begin it, and return once every pod's torchrun has been let go on in it."""
    one = pods[0]
    job = one.client.membership.snapshot().job
    assert job is not None
    await begin_next_life(one.client.store, KEYS, job)
    run = one.client.membership.keys.in_generation(job.generation + 1).run(RUN_ID)
    nodes = {run.node(other.registrar.identity.member) for other in pods}
    async with asyncio.timeout(PATIENCE_S):
        while not nodes <= one.client.mirror.kvs.keys():
            await one.client.mirror.changed_after(one.client.mirror.sequence)


def is_in_a_world(one: Pod, member: str) -> bool:
    run = one.endpoint.rendezvous().get(RUN_ID)
    node = run.snapshot().nodes.get(member) if run is not None else None
    return node is not None and node.state == "in"


async def test_i1_torchruns_of_a_former_life_leave_its_world_and_form_one_in_the_next() -> None:
    engine = MemoryEngine()
    # So long that who comes late, because this machine is slow, is waited for.
    last_call_s = 30.0
    async with (
        pod(engine, "w-0", last_call_s=last_call_s) as one,
        pod(engine, "w-1", last_call_s=last_call_s) as two,
    ):
        torchruns = Torchrun(one.port, "10.0.0.1"), Torchrun(two.port, "10.0.0.2")
        worlds = await asyncio.gather(*(asyncio.to_thread(t.form) for t in torchruns))
        assert [world[:2] for world in worlds] == [(0, 2), (1, 2)]

        await begin_it_and_move(one, two)
        worlds = await asyncio.gather(
            *(asyncio.to_thread(t.form_again_once_told) for t in torchruns)
        )
        assert [world[:2] for world in worlds] == [(0, 2), (1, 2)]
        assert one.registrar.generation == two.registrar.generation == 2
        await asyncio.gather(*(asyncio.to_thread(t.end) for t in torchruns))


async def test_i1_one_that_waits_for_its_former_world_is_let_go_and_gets_nothing_of_the_next() -> (
    None
):
    engine = MemoryEngine()
    last_call_s = 30.0
    async with (
        pod(engine, "w-0", last_call_s=last_call_s) as one,
        pod(engine, "w-1", last_call_s=last_call_s) as two,
    ):
        silent, waiting = Torchrun(one.port, "10.0.0.1"), Torchrun(two.port, "10.0.0.2")
        async with asyncio.timeout(PATIENCE_S):
            former = asyncio.create_task(asyncio.to_thread(waiting.form))
            await asyncio.to_thread(silent.join_alone)
            while not is_in_a_world(two, "w-1"):
                await two.client.mirror.changed_after(two.client.mirror.sequence)
        assert not former.done()  # for the master, which the silent one never names

        await begin_it_and_move(one, two)
        # The sidecar's word: who is left waiting gets an error of torch's.
        assert await former == (1, 2, 1)

        first, second = await asyncio.gather(
            asyncio.to_thread(silent.form_again_once_told),
            asyncio.to_thread(waiting.form_again_once_told),
        )
        assert (first[:2], second[:2]) == ((0, 2), (1, 2))
        assert first[2] == second[2] != 1
        await asyncio.gather(*(asyncio.to_thread(t.end) for t in (silent, waiting)))
