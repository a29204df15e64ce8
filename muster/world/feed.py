# SPDX-License-Identifier: Apache-2.0
"""The batches of one step after another, in whichever world that step is made.

A loader reads ahead, by the division of the world that it has begun in. So it begins again at the
cursor when the world has changed, and when a step broke: that step's batch is read once more.
"""

from __future__ import annotations

from typing import Any, Iterator, Optional, Tuple

from muster.batches import MicroBatch
from muster.data import ElasticSampler


class Feed:
    """The micro batches of this rank, as made by ``world.feed(loader)``: each pass is one step."""

    def __init__(self, loader: Any, sampler: ElasticSampler) -> None:
        self._loader = loader
        self._sampler = sampler
        self._moves = -1
        self._batches: Optional[Iterator[Tuple[Any, MicroBatch]]] = None

    def __iter__(self) -> Iterator[Tuple[Any, MicroBatch]]:
        """Yield the micro batches of the next step, each with its part in the global batch."""
        while True:
            if self._batches is None or self._moves != self._sampler.moves:
                self._moves = self._sampler.moves
                self._batches = self._sampler.follow(self._loader)
            found = next(self._batches, None)
            if found is None:  # the end of an epoch
                self._batches = None
                continue
            yield found
            if found[1].ends_step:
                return


def sampler_of(loader: Any) -> Any:
    """Return what divides the batches of a loader."""
    return loader if isinstance(loader, ElasticSampler) else getattr(loader, "batch_sampler", None)
