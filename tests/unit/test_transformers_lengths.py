# SPDX-License-Identifier: Apache-2.0
"""Global batches dealt by length: the same samples in each, in worlds of any size."""

from __future__ import annotations

import pytest

from muster.data import ElasticSampler
from muster.transformers_data import ByLength

ROWS, BATCH = 100, 16
LENGTHS = [1 + number * 37 % 61 for number in range(ROWS)]


def sampler_of(rank: int, world_size: int, micro_batch: int | None, last: str) -> ElasticSampler:
    given = {"global_batch": BATCH, "micro_batch": micro_batch, "last": last}
    return ElasticSampler(ROWS, 5, rank=rank, world_size=world_size, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("last", ["short", "drop", "pad"])
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 4), (3, 2), (4, None), (7, 2)])
def test_i12_each_global_batch_keeps_its_samples(
    world_size: int, micro_batch: int | None, last: str
) -> None:
    whole = sampler_of(0, 1, None, last)
    ranks = [sampler_of(rank, world_size, micro_batch, last) for rank in range(world_size)]
    for each in (whole, *ranks):
        each.go_to_step(2)
    dealt = [iter(ByLength(each, LENGTHS, last)) for each in ranks]
    for batch in whole.batches():
        together, at_once = [], []
        for number in range(ranks[0].plan.accumulation):
            micro = [next(each) for each in dealt]
            counted = [
                (part, len(part)) if each.parts[number].samples else ([], 0)
                for part, each in zip(micro, ranks, strict=True)
            ]
            assert [many for _, many in counted] == [each.parts[number].samples for each in ranks]
            at_once.append([LENGTHS[one] for part, _ in counted for one in part])
            together += [one for part, _ in counted for one in part]
        assert sorted(together) == sorted(batch)
        flat = [length for lengths in at_once for length in lengths]
        assert flat == sorted(flat, reverse=True), "the longest first, on all ranks at once"
        for each in ranks:
            each.advance()
    assert [list(each) for each in dealt] == [[]] * world_size
