# SPDX-License-Identifier: Apache-2.0
"""Micro batches of samples of about the same length, so that little is padded: pure."""

from __future__ import annotations

from typing import Dict, Iterator, List, Sequence

from muster.data import ElasticSampler


class ByLength:
    """The batches of a sampler with the samples of each global batch dealt by their length.

    Which samples a global batch has stays as it is, so the place in the data and the optimizer's
    steps do, too. The ranks have samples of about the same length at the same time, the longest
    first.
    """

    def __init__(self, sampler: ElasticSampler, lengths: Sequence[int], last: str) -> None:
        self._sampler, self._lengths = sampler, lengths
        self._whole = ElasticSampler(
            sampler.size,
            sampler.seed,
            global_batch=sampler.global_batch,
            last=last,
            rank=0,
            world_size=1,
        )
        self._bounds: Dict[int, List[slice]] = {}

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[List[int]]:
        """Yield this rank's micro batches from the sampler's cursor to the end of the epoch."""
        self._whole.go_to(self._sampler.cursor)
        for batch in self._whole.batches():
            ordered = sorted(map(int, batch), key=self._lengths.__getitem__, reverse=True)
            for own in self._bounds_of(len(ordered)):
                yield ordered[own] or ordered[-1:]

    def _bounds_of(self, total: int) -> List[slice]:
        """Return the places of this rank's micro batches in a batch of ``total`` samples."""
        if total not in self._bounds:
            plan, at, found = self._sampler.plan, 0, []
            parts = [plan.parts(rank, total) for rank in range(plan.world_size)]
            for number in range(plan.accumulation):
                for rank in range(plan.world_size):
                    end = at + parts[rank][number].samples
                    if rank == self._sampler.rank:
                        found.append(slice(at, end))
                    at = end
            self._bounds[total] = found
        return self._bounds[total]
