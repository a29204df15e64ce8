# SPDX-License-Identifier: Apache-2.0
"""One pod's endpoint over a real socket: sessions, runs and lives of the job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from launcher_shim.c10d.launchers import FAILED_LOOK_S
from launcher_shim.c10d.request_order import RelayNumbers
from launcher_shim.c10d.rounds import views
from launcher_shim.c10d.rounds.records import Node, Note, Round
from launcher_shim.c10d.rounds.stages import SHARED_RUN, round_prefix
from launcher_shim.c10d.session import LauncherSession
from launcher_shim.c10d.state_codec import SENTINEL, TorchState, decode
from launcher_shim.tcpstore import wire
from rdzv.job import JobClient
from rdzv.records.drain import Drain
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine
from tests.support.sidecars.endpoints import Pod, asks, pod
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.raw_client import DEADLINE_S, RawClient, connected
from tests.support.sidecars.runs import until
from tests.support.store.cut import Cut
from tests.support.tasks import beside

STATE_KEY = b"/torch.rendezvous.digits"


@asynccontextmanager
async def two_clients() -> AsyncIterator[tuple[RawClient, RawClient]]:
    engine = MemoryEngine()
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(pod(engine, f"w-{n}")) for n in range(2)]
        clients = [await stack.enter_async_context(connected(one.port)) for one in pods]
        yield clients[0], clients[1]


async def test_what_one_pod_stores_another_one_reads_counts_and_waits_for() -> None:
    async with two_clients() as (one, two):
        assert await one.open_rendezvous("digits") == SENTINEL
        assert await two.open_rendezvous("digits") == SENTINEL
        two.send(wire.Wait((b"/k", b"/n")))
        await one.ask(wire.Set(b"/k", b"value"))
        assert await one.ask(wire.Add(b"/n", 2)) == 2
        assert await two.byte() == wire.STOP_WAITING
        assert await two.ask(wire.Get(b"/k")) == b"value"
        assert await two.ask(wire.Add(b"/n", 3)) == 5
        assert await one.ask(wire.Check((b"/k", b"/missing"))) == wire.NOT_READY
        assert await one.ask(wire.Get(b"/missing")) == b""
        assert await one.ask(wire.DeleteKey(b"/k")) == 1
        assert await two.ask(wire.CompareSet(b"/k", b"", b"new")) == b"new"


async def test_the_state_key_exists_for_whoever_opened_the_rendezvous() -> None:
    async with two_clients() as (one, _):
        key = b"/torch.rendezvous.digits"
        await one.open_rendezvous("digits")
        assert await one.ask(wire.Wait((key,))) == wire.STOP_WAITING
        assert await one.ask(wire.Check((key,))) == wire.READY
        assert await one.ask(wire.Get(key)) == SENTINEL
        assert await one.ask(wire.NumKeys()) == 1


async def test_a_barrier_lets_go_when_all_have_come() -> None:
    async with two_clients() as (one, two):
        one.send(wire.Barrier(b"/b", 2))
        waiting = asyncio.create_task(one.byte())
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        assert await two.ask(wire.Barrier(b"/b", 2)) == wire.STOP_WAITING
        assert await waiting == wire.STOP_WAITING


async def test_a_client_that_comes_before_the_member_is_registered_is_served_once_it_is() -> None:
    async with pod(MemoryEngine(), "w-0", register=False) as one, connected(one.port) as raw:
        raw.send(wire.CompareSet(b"/torch.rendezvous.digits", b"", SENTINEL))
        answer = asyncio.create_task(raw.vec())
        done, _ = await asyncio.wait([answer], timeout=0.3)
        assert not done
        async with beside(one.registrar.run()), asyncio.timeout(DEADLINE_S):
            assert await answer == SENTINEL


async def test_a_relayed_client_that_ends_before_the_member_is_registered_leaves_no_record() -> (
    None
):
    preface = wire.Preface(b"s" * 16, following=2)
    record = KEYS.in_generation(1).run(SHARED_RUN).operation(f"w-0.{preface.session.hex()}")
    async with pod(MemoryEngine(), "w-0", register=False) as one:
        await one.client.store.txn([], [Put(record, b"1 ")])
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(preface.encode() + wire.HANDSHAKE)
        writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            await reader.read()
        writer.close()
        async with beside(one.registrar.run()), asyncio.timeout(DEADLINE_S):
            while (await one.client.store.range(record)).kvs:
                await one.client.mirror.changed_after(one.client.mirror.sequence)


async def test_i5_a_write_waits_for_the_store_and_its_connection_lives() -> None:
    cut = Cut()
    async with pod(MemoryEngine(), "w-0", cut) as one, connected(one.port) as raw:
        await raw.open_rendezvous("digits")
        await raw.ask(wire.Set(b"/known", b"1"))
        assert await raw.ask(wire.Get(b"/known")) == b"1"
        cut.cut()
        assert await raw.ask(wire.Wait((b"/known",))) == wire.STOP_WAITING
        assert await raw.ask(wire.Get(b"/known")) == b"1"
        raw.send(wire.Add(b"/n", 4))
        answer = asyncio.create_task(raw.number())
        done, _ = await asyncio.wait([answer], timeout=0.5)
        assert not done
        cut.mend()
        async with asyncio.timeout(DEADLINE_S):
            assert await answer == 4


@pytest.mark.parametrize("asks", [b"/torch.rendezvous.", wire.STAGE], ids=["joins", "starts"])
@pytest.mark.parametrize("run_id", [b"", b"~", b"digits (stage 2)", b"\xff\xfe"])
async def test_i8_a_run_id_that_is_no_name_closes_that_connection_alone(
    run_id: bytes, asks: bytes
) -> None:
    async with pod(MemoryEngine(), "w-0") as one:
        async with connected(one.port) as bad:
            bad.send(wire.CompareSet(asks + run_id, b"", SENTINEL))
            async with asyncio.timeout(DEADLINE_S):
                assert await bad.at_end()
        assert one.endpoint.rendezvous() == {}
        async with connected(one.port) as good:
            assert await good.open_rendezvous("digits") == SENTINEL


async def test_i8_an_add_on_a_word_closes_that_connection_alone() -> None:
    async with two_clients() as (one, two):
        await one.ask(wire.Set(b"/word", b"word"))
        one.send(wire.Add(b"/word", 1))
        async with asyncio.timeout(DEADLINE_S):
            assert await one.at_end()
        assert await two.ask(wire.Get(b"/word")) == b"word"


async def put_run(one: JobClient, generation: int, current: Round, *nodes: Node) -> None:
    run = KEYS.in_generation(generation).run("digits")
    puts = [Put(run.round, current.to_json())]
    puts += [Put(run.node(node.member), node.to_json()) for node in nodes]
    result = await one.store.txn([], puts)
    await one.mirror.reached(result.revision)


GONE = Node("w-9", "left", "nonce", 1, "10.0.0.9", 7, 0, left_reason="closed")


async def test_the_first_world_waits_for_no_pod_that_has_no_node() -> None:
    async with pod(MemoryEngine(), "w-0", first_call_s=3600) as one:
        job = one.client.membership.snapshot().job
        assert job is not None
        wanted = replace(job, desired=job.policy.min_nodes + 1, unplaced=1)
        await one.client.store.txn([], [Put(KEYS.job, wanted.to_json())])
        run = KEYS.in_generation(1).run("digits").round
        async with connected(one.port) as raw, asyncio.timeout(DEADLINE_S):
            await asks(raw, "digits")
            while run not in (kvs := one.client.mirror.kvs) or not Round.from_kv(kvs[run]).complete:
                await one.client.mirror.changed_after(one.client.mirror.sequence)


async def test_a_look_that_was_held_shows_what_it_was_held_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a client that has not joined is held by nothing."""
    monkeypatch.setattr(views, "HELD_MAX_S", DEADLINE_S)
    engine = MemoryEngine()
    async with AsyncExitStack() as stack:
        pods = [
            await stack.enter_async_context(pod(engine, name, first_call_s=3600, last_call_s=3600))
            for name in ("w-0", "w-1")
        ]
        one, two, reader = [
            await stack.enter_async_context(connected(port))
            for port in (pods[0].port, pods[1].port, pods[0].port)
        ]
        parked = await asks(one, "digits")
        one.send(wire.Get(STATE_KEY))
        look = asyncio.create_task(one.vec())
        assert await reader.ask(wire.Get(STATE_KEY)) == b""
        assert not look.done()
        await asks(two, "digits")
        async with asyncio.timeout(DEADLINE_S):
            assert await look != parked


async def test_a_look_is_held_no_longer_once_a_rank_has_failed_in_this_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views, "HELD_MAX_S", 2 * DEADLINE_S)
    engine, failed = MemoryEngine(), {"10.0.0.1:1"}  # that one was of a former world
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        pods = [
            await stack.enter_async_context(pod(engine, name, failed=lambda: failed, least=2))
            for name in ("w-0", "w-1")
        ]
        one, two = [await stack.enter_async_context(connected(each.port)) for each in pods]
        await asyncio.gather(asks(one, "digits"), asks(two, "digits"))
        while not decode(await looked(one))[0].complete:
            pass
        prefix = round_prefix("digits", pods[0].endpoint.rendezvous()["digits"].round.number)
        await one.ask(wire.Set(prefix + b"MASTER_ADDR", b"10.0.0.1"))
        await one.ask(wire.Set(prefix + b"MASTER_PORT", b"2"))
        leaver = pods[1].registrar.identity
        drain = Drain(leaver.pod_uid, leaver.member, "", "exec")
        put = Put(KEYS.in_generation(1).drain(leaver.pod_uid), drain.to_json())
        revision = (await pods[0].client.store.txn([], [put])).revision
        await pods[0].client.mirror.reached(revision)
        look = asyncio.create_task(looked(one))
        done, _ = await asyncio.wait([look], timeout=3 * FAILED_LOOK_S)
        assert not done
        failed.add("10.0.0.1:2")
        assert not decode(await look)[0].wait_list
        # Its process may take a while to end: torch looks again meanwhile.
        assert not decode(await looked(one))[0].wait_list


async def looked(raw: RawClient) -> bytes:
    blob = await raw.ask(wire.Get(STATE_KEY))
    assert isinstance(blob, bytes)
    return blob


async def test_who_asks_for_a_failed_run_begins_it_anew_and_leaves_other_runs_alone() -> None:
    async with pod(MemoryEngine(), "w-0") as one:
        runs = KEYS.in_generation(1)
        prep, train = runs.run("prep"), runs.run("train")
        failed = Round(3, complete=True, closed="failure", frozen=(GONE.seat,))
        trains = replace(GONE, state="in", left_reason="")
        live = Round(complete=True, frozen=(trains.seat,))
        # The torchruns' records of the failed one went with their pods.
        puts = [Put(prep.round, failed.to_json()), Put(train.round, live.to_json())]
        await one.client.store.txn([], [*puts, Put(train.node("w-9"), trains.to_json())])
        before = await one.client.store.range(train.prefix, prefix=True)
        async with connected(one.port) as raw, asyncio.timeout(DEADLINE_S):
            assert not decode(await asks(raw, "prep"))[0].closed
            while Round.from_kv(one.client.mirror.kvs[prep.round]).number < 4:
                await one.client.mirror.changed_after(one.client.mirror.sequence)
        assert (await one.client.store.range(train.prefix, prefix=True)).kvs == before.kvs
        assert one.registrar.generation == 1


async def test_a_run_closed_by_failure_that_somebody_is_still_in_keeps_others_waiting() -> None:
    async with pod(MemoryEngine(), "w-0") as one:
        world = Round(3, complete=True, closed="failure", frozen=(OTHER.seat,))
        await put_run(one.client, 1, world, OTHER)
        async with connected(one.port) as raw:
            shown, _ = decode(await asks(raw, "digits"))
        assert (shown.closed, shown.complete, len(shown.redundancy_list)) == (False, True, 1)
        assert one.endpoint.rendezvous()["digits"].round.closed == "failure"


PREFACE = wire.Preface(b"s" * 16, following=2)
MINE = Node("w-0", "in", PREFACE.session.hex(), 2, "10.0.0.1", 7, 0, round=3)
OTHER = replace(GONE, state="in", round=3, left_reason="")
WORLD = Round(3, complete=True, frozen=(OTHER.seat, MINE.seat))


class Relayed:
    """A client in that world, whose relay keeps what a sidecar notes for the next one."""

    def __init__(self) -> None:
        self._notes = [Note("digits", 1, MINE).encode()]

    async def ask(self, one: Pod, request: wire.Request) -> bytes:
        """Let its relay come to a sidecar with its last note, and send this."""
        relay = RelayNumbers(PREFACE._replace(note=self._notes[-1]), self._notes.append)
        session = LauncherSession(one.endpoint.sessions, "w-0.client", relay)
        answer = session.handle(request)
        return answer if isinstance(answer, bytes) else await answer

    async def shown(self, one: Pod) -> TorchState:
        return decode((await self.ask(one, wire.Get(STATE_KEY)))[8:])[0]


async def test_i11_a_world_that_must_form_again_does_so_under_the_next_sidecar_too() -> None:
    """The store was restored to before that was written; the relay keeps it."""
    client = Relayed()
    async with pod(MemoryEngine(), "w-0") as one, asyncio.timeout(DEADLINE_S):
        await put_run(one.client, 1, WORLD, MINE, GONE)
        address = STATE_KEY + b".3/MASTER_ADDR"
        assert await client.ask(one, wire.Wait((address,))) == wire.STOP_WAITING
        # It has been given a filler, so it never meets the other node, even if that one is back.
        await put_run(one.client, 1, WORLD, OTHER)
        assert (await client.shown(one)).wait_list


async def test_i1_a_world_that_a_restored_store_lost_is_put_back_from_what_a_relay_keeps() -> None:
    """No sidecar that saw it is left, and the store has its torchrun's former ask, and no round."""
    client = Relayed()
    async with asyncio.timeout(DEADLINE_S):
        async with pod(MemoryEngine(), "w-0") as one:
            await put_run(one.client, 1, WORLD, MINE, OTHER)
            assert len((await client.shown(one)).participants) == 2
        async with pod(MemoryEngine(), "w-0") as one:
            await put_run(one.client, 1, Round(2), replace(MINE, state="asking", ask=1, round=0))
            state = await client.shown(one)
            assert state.complete
            assert not state.wait_list
            assert len(state.participants) == 2
            key = one.client.keys.in_generation(1).run("digits").round
            await until(lambda: Round.from_kv(one.client.mirror.kvs[key]).restored)
            stored = Round.from_kv(one.client.mirror.kvs[key])
            assert (stored.number, stored.frozen) == (3, WORLD.frozen)


async def test_two_runs_of_one_job_do_not_see_each_others_keys() -> None:
    async with two_clients() as (one, two):
        await one.open_rendezvous("digits")
        await two.open_rendezvous("faces")
        await one.ask(wire.Set(b"/k", b"digits"))
        assert await two.ask(wire.Check((b"/k",))) == wire.NOT_READY
