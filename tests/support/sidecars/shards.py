# SPDX-License-Identifier: Apache-2.0
"""Ranks that train shards through the desks of their sidecars, on any store."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

from agent.parts import member_parts
from agent.shards import ShardDesk, ShardReply, ShardRequest
from agent.surroundings import MemberSettings
from muster.orders import ShardOrder
from muster.shard_log import ShardLog
from rdzv.drain.inputs import LiveRound, LiveRounds
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.store import Delete, Store
from tests.support.sidecars.jobs import identity, loaded, surroundings
from tests.support.sidecars.registrars import LONG_TTL_S, registered, running


class FixedRounds:
    """Rounds as a test sets them."""

    def __init__(self) -> None:
        self.own: LiveRound | None = None

    def live_rounds(self) -> LiveRounds:
        return LiveRounds(self.own, self.own)

    async def live_rounds_changed(self, before: LiveRounds) -> LiveRounds:
        raise NotImplementedError

    async def caught_up(self) -> None:
        """They are."""

    def ranks_at(self, round: LiveRound, step: int) -> bool:
        """No newcomer waits for them."""
        return False


class Pod:
    """A member with a desk."""

    def __init__(self, one: JobClient, name: str) -> None:
        who = identity(name)
        around = surroundings(one.store, name)
        settings = MemberSettings(keys=one.keys, identity=who, lease_ttl_s=LONG_TTL_S)
        self.name = name
        self.client = one
        self.rounds = FixedRounds()
        self.registration: asyncio.Task[None] | None = None
        self.registrar = member_parts(around, settings, one).registrar
        self.desk = ShardDesk(one, self.registrar, self.rounds, random=Random(name))

    async def vanish(self) -> None:
        """Let its lease end in the store, though its ranks live: as for a pod behind a cut."""
        assert self.registration is not None
        self.registration.cancel()
        await asyncio.wait([self.registration])
        generation = self.client.keys.in_generation(1)
        await self.client.store.txn([], [Delete(generation.member(self.name))])

    async def ask(self, **fields: object) -> ShardReply:
        """Ask as a rank does."""
        return await self.desk.answer(ShardRequest.from_line(json.dumps(fields).encode()))


@asynccontextmanager
async def pods(
    connect: Callable[[], Store],
    job: str,
    names: Iterable[str],
    clock: Callable[[], float],
) -> AsyncIterator[dict[str, Pod]]:
    """Members of one job, each with a mirror of its own."""
    async with AsyncExitStack() as stack:
        made = {}
        for name in names:
            one = JobClient.of(connect(), JobKeys("shards", job), clock=clock)
            await stack.enter_async_context(loaded(one))
            made[name] = pod = Pod(one, name)
            pod.registration = await stack.enter_async_context(running(pod.registrar))
        await registered(*(pod.registrar for pod in made.values()))
        yield made


class Rank:
    """One rank of a world that names itself."""

    def __init__(self, pod: Pod, order: ShardOrder, world: str, ranks: int, start: int) -> None:
        self.log = ShardLog(order)
        self.trained: list[tuple[int, int]] = []
        self.pod = pod
        self.step = start
        self._fields = {
            "name": "train",
            "world": world,
            "ranks": ranks,
            "local_rank": 0,
            "start": start,
            **order._asdict(),
        }

    async def ask(self, want: int, epoch: int = 0) -> ShardReply:
        """Ask once; an answer is taken in."""
        saves = list(self.log.saves)
        reply = await self.pod.ask(
            **self._fields,
            epoch=epoch,
            want=want,
            left=self.log.left,
            used=self.log.used,
            saves=saves,
        )
        if not (reply.wait or reply.lost or reply.refused):
            self.log.told(saves)
            self.log.give(reply.given)
        return reply

    def train(self, epoch: int = 0) -> int:
        """Train a shard, in a step of its own."""
        shard = self.log.next_shard()
        records = list(shard) if shard is not None else []
        self.step += 1
        self.trained += [(self.step, epoch * 10**9 + record) for record in records]
        self.log.arrive(self.step)
        return len(records)

    async def answered(self, want: int, epoch: int = 0) -> ShardReply:
        """Ask until there is an answer."""
        reply = await self.ask(want, epoch)
        while reply.wait:
            reply = await self.ask(want, epoch)
        return reply


class World:
    """Ranks that begin from one step; ``history`` is what their weights contain."""

    def __init__(
        self, ranks: list[Rank], start: int = 0, history: list[tuple[int, int]] | None = None
    ) -> None:
        self.ranks = ranks
        self.start = start
        self._history = history or []

    async def epoch(self, epoch: int = 0, steps: int | None = None) -> None:
        """Train, each rank by itself, until the epoch is done or each has made so many steps."""
        await asyncio.gather(*(self._train(rank, epoch, steps) for rank in self.ranks))

    async def _train(self, rank: Rank, epoch: int, steps: int | None) -> None:
        made = 0
        while steps is None or made < steps:
            made += 1
            if rank.train(epoch):
                continue
            reply = await rank.answered(3 * rank.log.order.shard_size, epoch)
            assert not reply.lost, reply.lost
            assert not reply.refused, reply.refused
            if reply.done:
                return
            if not reply.given:
                await asyncio.sleep(0.01)

    async def save(self) -> int:
        """Come to one step on all ranks, and save it."""
        step = max(rank.step for rank in self.ranks) + 1
        for rank in self.ranks:
            rank.step = step
            rank.log.arrive(step)
            rank.log.save(step)
        for rank in self.ranks:
            reply = await rank.answered(0)
            assert not reply.lost, reply.lost
        return step

    def history(self, until: int) -> list[tuple[int, int]]:
        """What weights of step ``until`` contain, by the ranks' own account."""
        own = [one for rank in self.ranks for one in rank.trained if one[0] <= until]
        return [one for one in self._history if one[0] <= until] + own


def repeated_or_lost(history: list[tuple[int, int]], size: int, epochs: int = 1) -> list[int]:
    """Records that are not in the history exactly once in each epoch."""
    seen = Counter(record for _, record in history)
    wanted = Counter(epoch * 10**9 + record for epoch in range(epochs) for record in range(size))
    return sorted((seen - wanted) + (wanted - seen))
