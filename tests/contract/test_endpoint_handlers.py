# SPDX-License-Identifier: Apache-2.0
"""torch's own client, backend and handler against a pod's endpoint, over a real socket."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

import launcher_shim.c10d.endpoint
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from rdzv.store.memory.client import MemoryEngine
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.handlers import PATIENCE_S, RUN_ID, Torchrun, World
from tests.support.sidecars.jobs import KEYS, begin_next_life


@pytest.fixture(autouse=True)
def _nobody_is_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is let go here is let go for another reason."""
    policy = partial(RoundPolicy, hung_s=10 * PATIENCE_S)
    monkeypatch.setattr(launcher_shim.c10d.endpoint, "RoundPolicy", policy)


async def started(one: Pod, address: str) -> Torchrun:
    return await asyncio.to_thread(Torchrun, one.port, address, keeps_alive=True)


async def test_one_whose_first_rank_died_before_it_spoke_comes_back_to_form_again() -> None:
    engine = MemoryEngine()
    async with pod(engine, "w-0") as one, pod(engine, "w-1") as two:

        def join_and_die() -> None:
            Torchrun(two.port, "10.0.0.1").join_alone()

        def join() -> World:
            torchrun = Torchrun(one.port, "10.0.0.2")
            world = torchrun.form()
            torchrun.is_told()
            return world

        world, _ = await asyncio.gather(asyncio.to_thread(join), asyncio.to_thread(join_and_die))
        assert world.rank == 1
        # The sidecar's word: who is left waiting gets an error of torch's.
        assert world.master_port == 1


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
    last_call_s = 30.0
    async with (
        pod(engine, "w-0", last_call_s=last_call_s) as one,
        pod(engine, "w-1", last_call_s=last_call_s) as two,
    ):
        torchruns = [await started(one, "10.0.0.1"), await started(two, "10.0.0.2")]
        worlds = await asyncio.gather(*(asyncio.to_thread(t.form) for t in torchruns))
        assert [world[:2] for world in worlds] == [(0, 2), (1, 2)]

        await begin_it_and_move(one, two)
        worlds = await asyncio.gather(*(asyncio.to_thread(t.form_once_told) for t in torchruns))
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
        silent, waiting = await started(one, "10.0.0.1"), await started(two, "10.0.0.2")
        async with asyncio.timeout(PATIENCE_S):
            former = asyncio.create_task(asyncio.to_thread(waiting.form))
            await asyncio.to_thread(silent.join_alone)
            while not is_in_a_world(two, "w-1"):
                await two.client.mirror.changed_after(two.client.mirror.sequence)
        assert not former.done()  # for the master, which the silent one never names

        await begin_it_and_move(one, two)
        # The sidecar's word: who is left waiting gets an error of torch's.
        former_world = await former
        assert (former_world[:2], former_world.master_port) == ((1, 2), 1)

        first, second = await asyncio.gather(
            asyncio.to_thread(silent.form_once_told), asyncio.to_thread(waiting.form_once_told)
        )
        assert (first[:2], second[:2]) == ((0, 2), (1, 2))
        assert first.master_port == second.master_port != 1
        await asyncio.gather(*(asyncio.to_thread(t.end) for t in (silent, waiting)))
