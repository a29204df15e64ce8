# SPDX-License-Identifier: Apache-2.0
"""Ranks that train shards which their sidecars hand out, and what the weights of a step contain."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent.shards import ShardReply, ShardRequest
from muster.orders import ShardOrder
from muster.shard_log import ShardLog
from rdzv.records.shards import Intervals, ShardWorld, union
from rdzv.shard_ledger import ShardLedger, ShardView
from rdzv.store import WatchEvent
from tests.simulation.nodes import KEYS

if TYPE_CHECKING:
    from tests.simulation.pods import Pod, SimulatedJob
    from tests.simulation.ranks import World

NAME = "train"
ORDER = ShardOrder(1_000_000, 2, None)
WANTED = 6
"""Places that a rank asks for at once: three steps of one shard each."""
ANSWER_S = 12.0
"""After so long without an answer the sidecar is taken for frozen."""
SAVE_S = 10.0
"""How long a save waits to be put on record."""


class ShardHistory:
    """Each place is once in the history that the weights contain, and on record so."""

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        self._saved: list[tuple[int, int, World]] = []
        """At which revision which step was saved, of which world."""
        self._view: ShardView | None = None
        self.restored_once = False

    def follow(self) -> None:
        """Look at each world that begins."""
        self._view = ShardView(KEYS, ())
        truth = self._job.invariants.truth
        truth.subscribe(self._view._apply)
        truth.subscribe(self._saw)

    @property
    def ledger(self) -> ShardLedger:
        """The store's word."""
        assert self._view is not None
        return self._view.ledger(NAME)

    def saved(self, world: World, step: int) -> None:
        """A rank has a checkpoint of this step on disk."""
        self._saved.append((self._job.engine.revision, step, world))

    def restored(self) -> None:
        """The store has gone back; so has the directory of the checkpoints."""
        self.restored_once = True
        self._saved = [one for one in self._saved if one[0] <= self._job.engine.revision]

    def weights(self, start: int) -> tuple[int, ...]:
        """What the checkpoint of a step contains, with what is in it twice."""
        for _, step, world in reversed(self._saved):
            if step == start:
                return world.contained(start)
        return ()

    def check(self) -> None:
        """All that was ever handed out is in the weights, or is open, or somebody holds it."""
        ledger = self.ledger
        over = any(pod.over for pod in ledger.pods.values())
        world = None if over or ledger.world is None else self._world_of(ledger.world)
        if world is None:
            return
        had = world.contained()
        self._once(had)
        out = _places(union(ledger.open.again, *(share.held for share in ledger.shares())))
        if lost := set(range(ledger.open.frontier)) - set(had) - out:
            self._job.invariants.break_(f"shards: {sorted(lost)[:9]} are lost")
        if again := set(had) & _places(ledger.open.again):
            self._job.invariants.break_(f"shards: {sorted(again)[:9]} are trained, and open again")

    def _world_of(self, record: ShardWorld) -> World | None:
        worlds = (w for (r, _), w in self._job.worlds.items() if r == (record.run, record.round))
        return next(worlds, None)

    def _once(self, weights: Sequence[int]) -> None:
        if twice := [place for place, many in Counter(weights).items() if many > 1]:
            self._job.invariants.break_(f"shards: {sorted(twice)[:9]} are in the weights twice")

    def _saw(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            world, trained = self.ledger.world, self.ledger.trained
            begins = event.kv.key == KEYS.shards_of(NAME).world and event.kind == "put"
            # What a restored store shows anew is no beginning.
            if world is None or not begins or trained.mod_revision != world.mod_revision:
                continue
            weights = self.weights(world.start)
            self._once(weights)
            known = _places(union(trained.places, *(save.places for save in trained.saves)))
            if known != set(weights):
                differ = sorted(known ^ set(weights))[:9]
                self._job.invariants.break_(
                    f"shards: the record of step {world.start} and its weights differ in {differ}"
                )


def _places(pieces: Intervals) -> set[int]:
    return {place for low, high in pieces for place in range(low, high)}


class RankShards:
    """What one rank holds, as ``muster.shards()`` would."""

    def __init__(self, job: SimulatedJob, pod: Pod, world: World, master: str) -> None:
        self.log = ShardLog(ORDER)
        self._job = job
        self._pod = pod
        self._world = world
        self._fields = {
            "name": NAME,
            "master": master,
            "ranks": world.size,
            "start": world.start,
            **ORDER._asdict(),
        }

    async def take(self, step: int) -> None:
        """Train the next shard in this step, where there is one."""
        shard = self.log.next_shard()
        if shard is None:
            await self._ask(WANTED)
            shard = self.log.next_shard()
        if shard is not None:
            self._world.shards.append((step, range(shard.place, shard.end)))
            list(shard)

    async def save(self, step: int) -> bool:
        """Put on record what the weights of a step contain; whether that has succeeded."""
        self.log.save(step)
        deadline_s = self._job.loop.time() + SAVE_S
        while self.log.saves:
            if self._job.loop.time() >= deadline_s:
                return False
            if not await self._ask(0):
                await asyncio.sleep(0.1)
        return True

    async def _ask(self, want: int) -> bool:
        """Ask the sidecar once; whether it has answered."""
        saves = list(self.log.saves)
        told = {"want": want, "left": self.log.left, "used": self.log.used, "saves": saves}
        confirmed = {"confirmed": self.log.confirmed}
        line = json.dumps({**self._fields, **told, **confirmed}).encode()
        reply = await self._answer(ShardRequest.from_line(line))
        if reply is None or reply.wait:
            return False
        if reply.refused and not self._job.shards.restored_once:
            self._job.invariants.break_(f"shards: shards are refused: {reply.refused}")
        if reply.lost or reply.refused:
            await self._end(reply.lost or reply.refused)
        self.log.told(saves)
        self.log.give(reply.given)
        return True

    async def _answer(self, request: ShardRequest) -> ShardReply | None:
        sidecar, loop = self._pod.sidecar, self._job.loop
        if sidecar is None:
            await asyncio.sleep(0.2)
            return None
        told: asyncio.Future[ShardReply] = loop.create_future()

        async def converse() -> None:
            reply = await sidecar.shards(request)
            if not told.done():
                told.set_result(reply)

        loop.spawn(sidecar.process, converse(), "shards")
        deadline_s = loop.time() + ANSWER_S
        while self._pod.sidecar is sidecar and not told.done() and loop.time() < deadline_s:
            await asyncio.wait([told], timeout=0.5)
        return told.result() if told.done() else None

    async def _end(self, why: str) -> None:
        """End the process by an exception: its torchrun starts another one."""
        self._job.timeline.add(self._pod.name, f"its rank fails: {why}")
        torchrun = self._pod.torchrun
        if torchrun is not None and torchrun.rank is not None:
            torchrun.order("rejoin")
        await asyncio.Event().wait()
