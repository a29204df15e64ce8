# SPDX-License-Identifier: Apache-2.0
"""The order of the samples of one epoch: the same in every world."""

from __future__ import annotations

from typing import List, Sequence

from muster.data.bijection import Bijection


class ShuffledOrder:
    """All samples, shuffled by seed and epoch."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._bijection = Bijection(size, "%d:%d" % (seed, epoch))

    def at(self, places: Sequence[int]) -> List[int]:
        """Return the samples at these places."""
        return self._bijection.at(places)


class PlainOrder:
    """All samples in their own order."""

    def at(self, places: Sequence[int]) -> List[int]:
        """Return the samples at these places."""
        return [int(place) for place in places]
