# SPDX-License-Identifier: Apache-2.0
"""Dynamic shards over each driver of the store: exactly once, fenced, and in a few keys."""

from __future__ import annotations

import asyncio
import json
import re
import time
from uuid import uuid4

import pytest

from agent.shards import ShardRequest
from muster.orders import ShardOrder
from rdzv.drain.inputs import LiveRound
from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.records.shards import PodShards
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.virtual import now
from tests.support.sidecars.shards import Pod, Rank, World, pods, repeated_or_lost
from tests.support.store.backend import Backend

SIZE = 1000
ORDER = ShardOrder(SIZE, 7, 3)
PATIENCE_S = 150.0


def world(
    made: dict[str, Pod],
    names: str,
    number: int,
    start: int = 0,
    history: list[tuple[int, int]] | None = None,
) -> World:
    ranks = [Rank(made[name], ORDER, f"w{number}", len(names), start) for name in names]
    return World(ranks, start, history)


async def test_a_world_that_begins_again_trains_what_the_save_does_not_contain(
    backend: Backend,
) -> None:
    async with pods(backend.connect, f"job-{uuid4().hex}", "abc", time.monotonic) as made:
        first = world(made, "abc", 1)
        await first.epoch(steps=20)
        saved = await first.save()
        await first.epoch(steps=10)  # which a kill -9 of the world takes back
        second = world(made, "ab", 2, saved, first.history(saved))
        await second.epoch(steps=1)
        late = await first.ranks[0].ask(7)
        assert "is over" in late.lost
        await second.epoch()
        end = await second.save()
        await second.epoch(1)
        end = await second.save()
        assert repeated_or_lost(second.history(end), SIZE, 2) == []
        keys = JobKeys("shards", made["a"].client.keys.job_name)
        found = await made["a"].client.store.range(keys.shards, prefix=True)
        assert len(found.kvs) == 3 + 2
        assert max(len(kv.value) for kv in found.kvs) < 2000


async def test_what_a_pod_held_that_is_gone_goes_to_others_and_its_word_counts_no_more(
    backend: Backend,
) -> None:
    async with pods(backend.connect, f"job-{uuid4().hex}", "ab", time.monotonic) as made:
        one = world(made, "ab", 1)
        await one.epoch(steps=3)
        saved = await one.save()
        straggler, other = one.ranks
        await straggler.answered(700)
        held = sum(high - low for low, high in straggler.log.left)
        assert held > 7
        await made["a"].vanish()
        alone = World([other], saved)
        await alone.epoch()
        assert len({record for _, record in other.trained}) == len(other.trained)
        assert (await other.answered(0)).done
        reply = await straggler.ask(0)
        while reply.wait:
            reply = await straggler.ask(0)
        assert "went to others" in reply.lost


@pytest.mark.virtual
async def test_only_ranks_of_the_live_round_begin_a_world() -> None:
    engine = MemoryEngine()
    async with pods(lambda: MemoryStore(engine), "job", "ab", now) as made:
        asked = {"name": "n", "size": 10, "shard_size": 2, "ranks": 2, "master": "a:1", "want": 2}
        assert "is not the live one" in (await made["a"].ask(**asked)).wait
        for pod in made.values():
            pod.rounds.own = LiveRound("run", 3, complete=True, members=("a", "b"), master="a:1")
        assert (await made["a"].ask(**asked)).given == ((0, 2),)
        made["b"].rounds.own = LiveRound("run", 4, complete=True, members=("b",), master="b:1")
        assert (await made["b"].ask(**{**asked, "master": "b:1", "ranks": 1})).given
        assert "is over" in (await made["a"].ask(**asked)).lost


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "'size' is None"),
        ({"size": 5, "shard_size": -1}, "'shard_size' is -1, expected a number from 1 on"),
        ({"size": 5, "shard_size": 1, "ranks": 1}, "'name' is None"),
        ({"size": 5, "shard_size": 1, "name": "n", "ranks": 1, "left": [[1]]}, "are no places"),
        (
            {"size": 5, "shard_size": 1, "name": "n", "ranks": 1, "saves": [[2, []], [1, []]]},
            "whose steps grow",
        ),
    ],
)
def test_a_line_that_is_no_request_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(RecordError, match=re.escape(sentence)):
        ShardRequest.from_line(json.dumps(fields).encode())


async def test_a_world_begins_however_many_pods_the_one_before_had(backend: Backend) -> None:
    async with pods(backend.connect, f"job-{uuid4().hex}", "a", time.monotonic) as made:
        first = world(made, "a", 1)
        await first.epoch(steps=3)
        saved = await first.save()
        client = made["a"].client
        here = client.keys.shards_of("train")
        for hundred in range(3):
            former = [f"former-{hundred}-{number}" for number in range(100)]
            records = [Put(here.pod(name), PodShards(name, name).to_json()) for name in former]
            result = await client.store.txn([], records)
            await client.mirror.reached(result.revision)
        second = world(made, "a", 2, saved, first.history(saved))
        async with asyncio.timeout(PATIENCE_S):
            await second.epoch()
        end = await second.save()
        assert repeated_or_lost(second.history(end), SIZE) == []
        assert len((await client.store.range(here.pods, prefix=True)).kvs) == 1
