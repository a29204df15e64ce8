# SPDX-License-Identifier: Apache-2.0
"""Dynamic shards over each driver of the store: exactly once, fenced, and in a few keys."""

from __future__ import annotations

import time
from uuid import uuid4

from muster.shard_order import ShardOrder
from rdzv.keys import JobKeys
from tests.support.sidecars.shards import Pod, Rank, World, pods, repeated_or_lost
from tests.support.store.backend import Backend

SIZE = 1000
ORDER = ShardOrder(SIZE, 7, 3)


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
