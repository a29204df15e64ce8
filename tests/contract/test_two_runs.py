# SPDX-License-Identifier: Apache-2.0
"""Two run ids in one job: the ranks of one train on beside a world that forms in the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from agent.parts import drains_of, endpoint_of, job_client, member_parts
from agent.rundir.files import RunDir
from agent.surroundings import MemberSettings, Sockets
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from launcher_shim.rundir import layout
from rdzv.drain.gate import Gate
from rdzv.records.drain import Drain, LastCommit
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.records import member
from tests.support.sidecars.jobs import KEYS, identity, surroundings
from tests.support.sidecars.raw_client import DEADLINE_S

HERE = KEYS.in_generation(1)
DIGITS, OTHER = HERE.run("digits"), HERE.run("prepare")
VERSION = "0.2.0"
"""Any: a sidecar that names none is of 0.1.0, and knows one run at a time."""
PREFIX = b"/torch.rendezvous.digits.3/"
WORLD = Round(3, complete=True, frozen=(Seat("w-0", "n", 1), Seat("w-1", "n", 1)))
OTHER_WORLD = Round(1, complete=True, frozen=(Seat("w-2", "n", 1),))


class ReadRunDir(RunDir):
    """A run directory of which each gate is read as it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.gates = asyncio.Queue[Gate]()
        self._loop = asyncio.get_running_loop()

    def put(self, name: str, content: bytes) -> None:
        super().put(name, content)
        if name == layout.GATE:
            gate = Gate.from_json(name, content)
            self._loop.call_soon_threadsafe(self.gates.put_nowait, gate)

    async def gate_with(self, last: LastCommit) -> Gate:
        """Wait for the gate that tells of a last commit."""
        while (gate := await self.gates.get()).last_commit != last:
            pass
        return gate


def node(member: str, number: int) -> Node:
    return Node(member, "in", "n", 1, "10.0.0.1", 1, 0, number)


@asynccontextmanager
async def in_digits(tmp_path: Path) -> AsyncIterator[tuple[MemoryStore, ReadRunDir]]:
    """The sidecar of w-0, which trains in a world of one run; a newer one has a world as well."""
    store, run_dir = MemoryStore(MemoryEngine()), ReadRunDir(tmp_path)
    await store.txn(
        [],
        [
            Put(DIGITS.round, WORLD.to_json()),
            Put(DIGITS.node("w-0"), node("w-0", 3).to_json()),
            Put(DIGITS.node("w-1"), node("w-1", 3).to_json()),
            Put(DIGITS.value(PREFIX + b"MASTER_ADDR"), b"10.0.0.1"),
            Put(DIGITS.value(PREFIX + b"MASTER_PORT"), b"29500"),
        ],
    )
    around = surroundings(store, "w-0")
    who = replace(identity("w-0"), version=VERSION)
    settings = MemberSettings(keys=KEYS, identity=who, lease_ttl_s=60)
    client = job_client(around, KEYS)
    parts = member_parts(around, settings, client)
    endpoint = endpoint_of(around, settings, parts, Sockets(c10d_port=0))
    drains = drains_of(around, settings, parts, endpoint, run_dir, None)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        vital = (client.watching, parts.registrar, endpoint, drains)
        running = [tasks.create_task(part.run()) for part in vital]
        await parts.registrar.registered.wait()
        first = LastCommit(6, 2, 1)
        await store.txn([], [Put(KEYS.last_commit, first.to_json())])
        assert (await run_dir.gate_with(first)).master == "10.0.0.1:29500"
        # What comes after it in the store is shown after it.
        newer = [
            Put(OTHER.round, OTHER_WORLD.to_json()),
            Put(OTHER.node("w-2"), node("w-2", 1).to_json()),
        ]
        await store.txn([], newer)
        yield store, run_dir
        for task in running:
            task.cancel()


async def test_i11_a_gate_stays_of_the_round_that_its_ranks_are_in_beside_a_newer_world(
    tmp_path: Path,
) -> None:
    async with in_digits(tmp_path) as (store, run_dir):
        then = LastCommit(7, 3, 2)
        await store.txn([], [Put(KEYS.last_commit, then.to_json())])
        gate = await run_dir.gate_with(then)
        # Ranks stand still for as long as they are shown another round's.
        assert (gate.run, gate.round, gate.phase) == ("digits", 3, "idle")
        assert gate.master == "10.0.0.1:29500"


async def test_i3_who_leaves_a_world_beside_a_newer_one_of_another_run_is_waited_for(
    tmp_path: Path,
) -> None:
    async with in_digits(tmp_path) as (store, run_dir):
        others = [
            Put(HERE.member(name), member(name, version=VERSION).to_json())
            for name in ("w-1", "w-2")
        ]
        await store.txn([], others)
        notice = Drain("uid-w-0", "w-0", "spot", "operator")
        await store.txn([], [Put(HERE.drain(notice.pod_uid), notice.to_json())])
        while (gate := await run_dir.gates.get()).phase != "hold":
            # It is not let go before its ranks have had the chance to save.
            assert not gate.granted
        assert (gate.run, gate.round, gate.leaving) == ("digits", 3, True)
