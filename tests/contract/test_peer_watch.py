# SPDX-License-Identifier: Apache-2.0
"""Members that watch each other, on the memory store: who is suspected, kept and evicted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count

import pytest

from agent.neighbour import PeerAway
from agent.parts import MemberParts, job_client, member_parts
from agent.surroundings import MemberSettings
from launcher_shim.c10d.rounds.records import LOST, Node, Round
from rdzv.peers import Sign, Unreached
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Member
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.records import node
from tests.support.sidecars.jobs import KEYS, identity, surroundings
from tests.support.store.cut import Cut

pytestmark = pytest.mark.virtual

TTL_S = 600.0
"""No lease ends by itself."""
LONG_S = 60.0
HERE = KEYS.in_generation(1)
RUN = HERE.run("none")


class Wire:
    """One open line in the test's network."""

    def __init__(self) -> None:
        self._end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def ended(self) -> bool:
        return await asyncio.shield(self._end)

    def close(self) -> None:
        self.end(silent=False)

    def end(self, *, silent: bool) -> None:
        if not self._end.done():
            self._end.set_result(silent)


class Network:
    """Which member reaches which. ``signs``: what a line from one to another meets, if anything."""

    def __init__(self) -> None:
        self.signs: dict[tuple[str, str], Sign] = {}
        self._wires: dict[int, tuple[str, str, Wire]] = {}
        self._numbers: Iterator[int] = count()

    async def dial(self, by: str, member: Member) -> Wire:
        if (sign := self.signs.get((by, member.name))) is not None:
            await asyncio.sleep(0.01 if sign == "refused" else 0.9)
            raise PeerAway(sign)
        wire = Wire()
        self._wires[next(self._numbers)] = by, member.name, wire
        return wire

    def break_lines(self, name: str, *by: str, sign: Sign = "silent") -> None:
        """Let these lose their lines to ``name``, and find no other."""
        self.signs |= {(one, name): sign for one in by}
        for one, other, wire in self._wires.values():
            if other == name and one in by:
                wire.end(silent=sign == "silent")

    def cut(self, name: str, *others: str) -> None:
        """Cut one off from all others."""
        self.break_lines(name, *others)
        for other in others:
            self.break_lines(other, name)


class Job:
    """Members on one store; ``cables`` are those to it."""

    def __init__(self) -> None:
        self.engine = MemoryEngine(now)
        self.network = Network()
        self.cables: dict[str, Cut] = {}
        self.parts: dict[str, MemberParts] = {}
        self.tasks: dict[str, list[asyncio.Task[None]]] = {}
        self.eye = MemoryStore(self.engine)

    async def add(self, name: str) -> None:
        cable = self.cables[name] = Cut()
        network = self.network

        async def dial(member: Member) -> Wire:
            return await network.dial(name, member)

        around = replace(surroundings(MemoryStore(self.engine, faults=cable), name), dial=dial)
        who = replace(identity(name, least=1, most=8), node=f"machine-{name}", health_port=9400)
        settings = MemberSettings(keys=KEYS, identity=who, lease_ttl_s=TTL_S)
        parts = self.parts[name] = member_parts(around, settings, job_client(around, KEYS))
        assert parts.peers is not None
        loops = (parts.client.watching, parts.registrar, parts.losses, parts.peers)
        self.tasks[name] = [asyncio.create_task(loop.run()) for loop in loops]
        await parts.registrar.registered.wait()

    def kill(self, name: str) -> None:
        for task in self.tasks[name]:
            task.cancel()

    async def members(self) -> str:
        read = await self.eye.range(HERE.members, prefix=True)
        return "".join(kv.key[-1] for kv in read.kvs)

    async def since(self, name: str) -> int:
        """The incarnations that one has had since its first."""
        member = Member.from_kv((await self.eye.range(HERE.member(name))).kvs[0])
        return member.incarnation - member.since

    async def losses(self) -> list[str]:
        read = await self.eye.range(KEYS.history, prefix=True)
        entries = [HistoryEntry.from_kv(kv) for kv in read.kvs]
        return [one.member for one in entries if one.what == "lost"]

    async def suspicions(self) -> list[str]:
        return [kv.key for kv in (await self.eye.range(HERE.suspicions, prefix=True)).kvs]

    async def world(self, names: str, *, ends: str = "", finishing: bool = False) -> None:
        """Put them into a round, each node on its member's lease."""
        places = {name: node(name, "in") for name in names}
        seats = tuple(place.seat for place in places.values())
        formed = Round(3, complete=True, frozen=seats, ends=ends, finishing=finishing)
        puts = [Put(RUN.round, formed.to_json())]
        for name, place in places.items():
            lease = self.parts[name].registrar.lease_id
            puts.append(Put(RUN.node(name), place.to_json(), lease or 0))
        await self.eye.txn([], puts)

    async def node(self, name: str) -> Node:
        return Node.from_kv((await self.eye.range(RUN.node(name))).kvs[0])


@asynccontextmanager
async def job(names: str) -> AsyncIterator[Job]:
    """Members that have opened their lines."""
    one = Job()
    async with AsyncExitStack() as stack:
        for name in names:
            await one.add(name)
        for name in names:
            stack.callback(one.kill, name)
        await asyncio.sleep(5.0)
        yield one
    for tasks in one.tasks.values():
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_machine_that_is_gone_is_evicted_long_before_its_lease_ends() -> None:
    async with job("abcd") as one:
        await one.world("abcd")
        one.kill("c")
        one.network.cut("c", "a", "b", "d")
        await asyncio.sleep(3.0)
        assert await one.members() == "abd"
        gone = await one.node("c")
        assert (gone.state, gone.left_reason) == ("left", "closed")
        await asyncio.sleep(LONG_S)
        assert await one.losses() == ["c"]
        assert await one.suspicions() == []


async def test_i5_a_member_that_reaches_the_store_is_not_evicted() -> None:
    """It takes the suspicions away, and they do not come back."""
    async with job("abcd") as one:
        one.network.cut("c", "a", "b", "d")
        await asyncio.sleep(LONG_S)
        assert (await one.members(), await one.since("c")) == ("abcd", 0)
        assert await one.suspicions() == []


async def test_i5_a_member_that_others_reach_is_not_evicted() -> None:
    async with job("abcde") as one:
        one.cables["c"].cut()
        one.network.break_lines("c", "a", "b")
        await asyncio.sleep(LONG_S)
        assert (await one.members(), await one.since("c")) == ("abcde", 0)


async def test_i5_a_store_outage_evicts_nobody() -> None:
    async with job("abcd") as one:
        for cable in one.cables.values():
            cable.cut()
        one.network.cut("c", "a", "b", "d")
        await asyncio.sleep(LONG_S)
        assert await one.members() == "abcd"
        for cable in one.cables.values():
            cable.mend()
        await asyncio.sleep(LONG_S)
        assert (await one.members(), await one.since("c")) == ("abcd", 0)


async def test_i5_in_a_job_of_two_nobody_is_evicted() -> None:
    async with job("ab") as one:
        one.kill("b")
        one.network.cut("a", "b")
        await asyncio.sleep(LONG_S)
        assert await one.members() == "ab"


async def test_i5_a_sidecar_that_is_away_while_its_ranks_train_is_not_evicted() -> None:
    async with job("abcd") as one:
        await one.world("abcd")
        one.kill("c")
        one.network.break_lines("c", "a", "b", "d", sign="refused")
        await asyncio.sleep(LONG_S)
        assert await one.members() == "abcd"
        await one.world("abcd", ends=f"{LOST}d")
        await asyncio.sleep(LONG_S)
        assert await one.members() == "abd"


async def test_nobody_is_evicted_while_a_world_ends_well() -> None:
    """Its last work would be cut off for one that may have finished."""
    async with job("abcd") as one:
        await one.world("abcd", finishing=True)
        one.kill("c")
        one.network.cut("c", "a", "b", "d")
        await asyncio.sleep(LONG_S)
        assert await one.members() == "abcd"


async def test_i6_one_that_was_evicted_and_lives_comes_back_with_its_next_incarnation() -> None:
    async with job("abcd") as one:
        one.cables["c"].cut()
        one.network.cut("c", "a", "b", "d")
        await asyncio.sleep(LONG_S)
        assert await one.members() == "abd"
        one.network.signs.clear()
        one.cables["c"].mend()
        await asyncio.sleep(LONG_S)
        assert (await one.members(), await one.since("c") > 0) == ("abcd", True)
        assert await one.losses() == ["c"]


async def test_a_line_that_opens_again_takes_its_suspicion_back() -> None:
    async with job("abcd") as one:
        one.cables["c"].cut()
        one.network.break_lines("c", "b")
        await asyncio.sleep(0.05)
        one.network.signs.clear()
        await asyncio.sleep(LONG_S)
        assert await one.suspicions() == []
        assert await one.members() == "abcd"


async def test_neighbours_that_were_never_reached_are_on_record_and_not_suspected() -> None:
    """A NetworkPolicy may close the port from the start."""
    one = Job()
    one.network.signs = {(by, of): "silent" for by in "abc" for of in "abc" if by != of}
    for name in "abc":
        await one.add(name)
    await asyncio.sleep(2 * LONG_S)
    read = await one.eye.range(HERE.unreached, prefix=True)
    assert [Unreached.from_kv(kv).members for kv in read.kvs] == [
        ("b", "c"),
        ("a", "c"),
        ("a", "b"),
    ]
    assert await one.suspicions() == []
    one.network.signs.clear()
    await asyncio.sleep(LONG_S)
    assert (await one.eye.range(HERE.unreached, prefix=True)).kvs == ()
    for name in "abc":
        one.kill(name)
        await asyncio.gather(*one.tasks[name], return_exceptions=True)


async def test_two_machines_that_fail_at_once_are_both_evicted() -> None:
    async with job("abcdef") as one:
        for lost in "bc":
            one.kill(lost)
        for lost, others in {"b": "acdef", "c": "abdef"}.items():
            one.network.cut(lost, *others)
        await asyncio.sleep(LONG_S)
        assert await one.members() == "adef"
