# SPDX-License-Identifier: Apache-2.0
"""A cursor says which order it is a place in: another one is refused, or loses no sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from muster.data import ElasticSampler, ShardStream, shard_stream
from muster.orders import KINDS

ROWS, BATCH, STOP = 120, 12, 5
SHARDS = (40, 40, 40)


def rows(size: int = ROWS, **options: Any) -> ElasticSampler:
    return ElasticSampler(size, 3, rank=0, world_size=1, **{"global_batch": BATCH, **options})


def stream(records: tuple[int, ...] = SHARDS, **options: Any) -> ShardStream:
    def read(shard: int, start: int, stop: int) -> Iterator[int]:
        return iter(range(sum(records[:shard]) + start, sum(records[:shard]) + stop))

    options = {"global_batch": BATCH, "lanes": 4, **options}
    return shard_stream(records, read, 3, rank=0, world_size=1, **options)


def sampler_of(made: Any) -> ElasticSampler:
    return made.sampler if isinstance(made, ShardStream) else made


def lives(then: Any, now: Any, stop: int = STOP, without: tuple[str, ...] = ()) -> Counter[Any]:
    """Train ``stop`` steps of one life, and in another one what is left of the epoch."""
    seen = [one for batch, _ in islice(then.follow(then), stop) for one in batch]
    cursor = {name: value for name, value in sampler_of(then).cursor.items() if name not in without}
    sampler_of(now).go_to(cursor)
    if sampler_of(now).epoch == 0:
        seen += [one for batch, _ in now.follow(now) for one in batch]
    return Counter(seen)


@pytest.mark.parametrize(
    ("make", "again", "said", "before"),
    [
        (rows, lambda: rows(shuffle=False),
         "shuffle=True, and this one has shuffle=False", "27 never, 27 twice"),
        (stream, lambda: stream(lanes=2),
         "lanes=4, and this one has lanes=2", "30 never, 30 twice"),
        (stream, lambda: stream(global_batch=24),
         "global_batch=12, and this one has global_batch=24", "6 never, 6 twice"),
        (stream, lambda: stream(lanes=1),
         "lanes=4, global_batch=12, and this one has lanes=1", "some never, some twice"),
        (stream, lambda: stream((30, 50, 40)),
         "of shards with other numbers of records", "10 never, 10 twice"),
        (stream, lambda: stream((40, 40, 20, 20)),
         "shards=3, and this one has shards=4", "some never, some twice"),
        (rows, stream,
         "of rows (ElasticSampler), and this is a stream of shards", "another order"),
        (stream, rows,
         "of a stream of shards (shard_stream), and this is rows", "another order"),
    ],
)  # fmt: skip
def test_i12_a_cursor_of_another_order_is_refused(
    make: Any, again: Any, said: str, before: str
) -> None:
    with pytest.raises(ValueError, match="give what the epoch has begun with") as caught:
        lives(make(), now := again())
    assert said in str(caught.value), before
    assert sampler_of(now).cursor["samples"] == 0, "a refused cursor changes nothing"


@pytest.mark.parametrize(
    ("make", "then", "now"),
    [
        (rows, {}, {"global_batch": 32}),
        (rows, {"shuffle": False}, {"shuffle": False, "micro_batch": 5}),
        (stream, {"lanes": 1}, {"lanes": 1, "global_batch": 25}),
        (stream, {}, {"micro_batch": 5}),
    ],
    ids=["rows, batch", "rows in order", "one lane, batch", "lanes, micro batch"],
)
@pytest.mark.parametrize("without", [(), tuple(KINDS)], ids=["", "a cursor without its order"])
def test_i12_options_that_leave_the_order_alone_may_change(
    make: Any, then: dict[str, Any], now: dict[str, Any], without: tuple[str, ...]
) -> None:
    assert lives(make(**then), make(**now), stop=2, without=without) == Counter(range(ROWS))


def test_an_epoch_that_has_not_begun_may_have_another_order() -> None:
    assert lives(rows(), rows(shuffle=False), stop=ROWS // BATCH) == Counter(range(ROWS))
    assert lives(stream(), stream(lanes=2), stop=ROWS // BATCH) == Counter(range(ROWS))
