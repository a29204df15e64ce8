# SPDX-License-Identifier: Apache-2.0
"""The sampler and the stream below torch's own DataLoader, with workers that read ahead."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from muster.data import ElasticSampler, ShardStream, shard_stream

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

ROWS, BATCH = 200, 16
RECORDS = [30, 0, 55, 7, 108]


def read(shard: int, start: int, stop: int) -> list[tuple[int, int]]:
    return [(shard, record) for record in range(start, stop)]


def of_rows(rank: int, world: int) -> tuple[ElasticSampler, Any]:
    sampler = ElasticSampler(
        ROWS, 5, global_batch=BATCH, micro_batch=3, rank=rank, world_size=world
    )
    loader: Any = DataLoader(
        range(ROWS), batch_sampler=sampler, num_workers=2, prefetch_factor=3, collate_fn=list
    )
    return sampler, lambda: sampler.follow(loader)


def of_shards(rank: int, world: int) -> tuple[ElasticSampler, Any]:
    stream: ShardStream = shard_stream(
        RECORDS, read, 5, global_batch=BATCH, lanes=4, micro_batch=3, rank=rank, world_size=world
    )
    loader: Any = DataLoader(stream, batch_size=None, num_workers=2, collate_fn=list)
    return stream.sampler, lambda: stream.follow(loader)


@pytest.mark.parametrize(
    ("make", "everything"),
    [
        (of_rows, Counter(range(ROWS))),
        (of_shards, Counter((at, one) for at, many in enumerate(RECORDS) for one in range(many))),
    ],
    ids=["rows", "shards"],
)
def test_i12_what_workers_have_read_ahead_is_not_trained(
    make: Any, everything: Counter[Any]
) -> None:
    """A world of three for four steps, then one of two to the end of the epoch."""
    seen: Counter[Any] = Counter()
    cursors = []
    for rank in range(3):
        sampler, follow = make(rank, 3)
        for batch, part in islice(follow(), 4 * sampler.plan.accumulation):
            seen.update(map(_plain, batch) if part.samples else ())
        cursors.append(sampler.cursor)
    assert cursors[0]["samples"] == 4 * BATCH
    assert cursors == cursors[:1] * 3
    for rank in range(2):
        sampler, follow = make(rank, 2)
        sampler.go_to(cursors[0])
        for batch, part in follow():
            seen.update(map(_plain, batch) if part.samples else ())
        assert (sampler.epoch, sampler.samples) == (1, 0)
    assert seen == everything


def _plain(sample: Any) -> Any:
    return tuple(sample) if isinstance(sample, list) else sample


def test_workers_that_persist_are_refused_by_a_stream() -> None:
    stream = shard_stream(RECORDS, read, global_batch=BATCH, rank=0, world_size=1)
    loader: Any = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match="persistent_workers"):
        stream.follow(loader)
