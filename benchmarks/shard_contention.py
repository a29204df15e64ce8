# SPDX-License-Identifier: Apache-2.0
"""A hundred ranks take shards of one data set from one etcd: all at once, and at their own pace.

Each has the desk, mirror and connection of a sidecar of its own, in this process.
"""

from __future__ import annotations

import asyncio
import time
from random import Random

from agent.shards import BATCH_PER_POD_S
from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_one, of_runs, p99, say_load
from muster.orders import ShardOrder
from rdzv.store.etcd.client import EtcdStore
from tests.support.sidecars.shards import Rank, pods

RANKS = 100
SHARDS, SHARD = 20_000, 10
WANTED = 20 * SHARD
ROUNDS = 5
"""Requests of each rank at its own pace."""
WITHIN_S = 300.0
"""Time limit for a process that hangs."""


async def measure() -> list[Figure]:
    """Let all ranks ask at once, and then each every few seconds."""
    say_load()
    order = ShardOrder(SHARDS * SHARD, SHARD, 7)
    names = [f"worker-{number}" for number in range(RANKS)]
    async with asyncio.timeout(WITHIN_S), etcd_server() as endpoint:
        stores: list[EtcdStore] = []

        def connect() -> EtcdStore:
            stores.append(EtcdStore([endpoint]))
            return stores[-1]

        async with pods(connect, "job", names, time.monotonic) as made:
            ranks = [Rank(pod, order, "w", RANKS, 0) for pod in made.values()]
            began_s = time.monotonic()
            await asyncio.gather(*(_take(rank) for rank in ranks))
            burst_s = time.monotonic() - began_s
            paced = [_paced(rank, Random(at)) for at, rank in enumerate(ranks)]
            answers = await asyncio.gather(*paced)
            twice = _given_twice(ranks)
        for store in stores:
            await store.close()
    took = [one for some in answers for one in some]
    return [
        of_one(
            f"shards/{RANKS} ranks ask at once, until all have records",
            "s",
            Bar("value", "<=", 5.0),
            burst_s,
        ),
        of_runs(
            f"shards/an answer at the pace of {RANKS} ranks, 99th percentile",
            "s",
            Bar("value", "<=", 1.0),
            took,
            by=p99,
        ),
        of_one("shards/places given to two ranks", "1", Bar("value", "==", 0), twice),
    ]


async def _take(rank: Rank) -> float:
    began_s = time.monotonic()
    reply = await rank.answered(WANTED)
    assert reply.given, reply
    return time.monotonic() - began_s


async def _paced(rank: Rank, random: Random) -> list[float]:
    pace_s = BATCH_PER_POD_S * RANKS
    await asyncio.sleep(random.uniform(0.0, pace_s))
    took = []
    for _ in range(ROUNDS):
        while rank.train():
            pass
        took.append(await _take(rank))
        await asyncio.sleep(max(0.0, pace_s - took[-1]))
    return took


def _given_twice(ranks: list[Rank]) -> int:
    given = [record for rank in ranks for _, record in rank.trained]
    return len(given) - len(set(given))
