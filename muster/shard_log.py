# SPDX-License-Identifier: Apache-2.0
"""The shards that one rank holds of a data set, and what it has trained by which step: no I/O.

Places are counted along one line, the epochs one after the other. Records given to the loop count
as trained with the step whose boundary it comes to next.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Iterable, List, NamedTuple, Tuple

from muster.shard_order import ShardOrder

Piece = Tuple[int, int]


STEPS_APART = 10_000
"""The number of newest steps, at least, whose records are known step by step; a save reported later
than that does not count. Each step takes some 200 bytes."""


class Shard:
    """Consecutive records, by number: iterate over it, once. ``len()`` is how many are left."""

    def __init__(self, first: int, last: int, place: int, end: int) -> None:
        self.start = first
        self.stop = last
        self.place = place
        """The place of the first record that the loop has not been given."""
        self.end = end
        """The place after its last record and after all places that have no record."""

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> "Shard":
        return self

    def __next__(self) -> int:
        if self.start >= self.stop:
            self.place = self.end
            raise StopIteration
        self.start += 1
        self.place = self.place + 1 if self.start < self.stop else self.end
        return self.start - 1

    def take(self, count: int) -> List[int]:
        """Take the next records, ``count`` at most."""
        taken = list(range(self.start, min(self.stop, self.start + count)))
        self.start += len(taken)
        self.place = self.place + len(taken) if self.start < self.stop else self.end
        return taken


class Save(NamedTuple):
    """The pieces that were trained since the save before, up to and including ``step``."""

    step: int
    pieces: List[Piece]


class ShardLog:
    """The log of one rank. ``saves`` are those that the sidecar has not put on record yet."""

    def __init__(self, order: ShardOrder) -> None:
        self.order = order
        self._left: Deque[Piece] = deque()
        self._current: List[Tuple[int, Shard]] = []
        """Shards that the loop has in hand, each with the first place not yet counted."""
        self._since: List[Piece] = []
        """Pieces trained since the last boundary."""
        self._steps: Deque[Save] = deque()
        """Pieces trained by each boundary since the last save; only boundaries with any."""
        self._arrived = self._saved = self._together_to = -1
        self.saves: List[Save] = []
        self.confirmed = 0
        """The newest step whose save the sidecar has put on record; 0 for none."""

    def give(self, pieces: Iterable[Piece]) -> None:
        """Add places to train."""
        self._left.extend((low, high) for low, high in pieces)

    def next_shard(self) -> "Shard | None":
        """Return the next shard, or the rest of one that came back; None if nothing is held.

        The rest of the shard before, which the loop has not taken, comes again later.
        """
        self._count()
        for _, shard in self._current:
            self._left.append((shard.place, shard.end))
            shard.stop = shard.start
        self._current = []
        while self._left:
            low, high = self._left.popleft()
            first, last, end = self.order.records(low, high)
            if end < high:
                self._left.appendleft((end, high))
            if first < last:
                shard = Shard(first, last, low, end)
                self._current.append((low, shard))
                return shard
            self._since.append((low, end))
        return None

    @property
    def left(self) -> List[Piece]:
        """Pieces that are held, and not given to the loop."""
        in_hand = [
            (shard.place, shard.end) for _, shard in self._current if shard.place < shard.end
        ]
        return in_hand + list(self._left)

    @property
    def used(self) -> List[Piece]:
        """Pieces given to the loop since the last save."""
        self._count()
        return joined([piece for save in self._steps for piece in save.pieces] + self._since)

    def arrive(self, step: int) -> None:
        """Come to the boundary after ``step``.

        Raises ``ValueError`` if steps do not grow, or count from 0.
        """
        if step < self._arrived:
            raise ValueError(
                "step %d comes after step %d, and shards were trained at both: count the steps of"
                " a job on from one loop to the next" % (step, self._arrived)
            )
        self._arrived = step
        self._count()
        if self._since and step < 1:
            raise ValueError(
                "shards were trained at step %d, and a job with shards counts its steps from 1 on:"
                " step 0 is that of weights without a checkpoint" % step
            )
        if self._since:
            self._steps.append(Save(step, joined(self._since)))
            self._since = []
        if len(self._steps) > 2 * STEPS_APART:
            oldest = [self._steps.popleft() for _ in range(STEPS_APART)]
            pieces = joined([piece for one in oldest for piece in one.pieces])
            self._together_to = oldest[-1].step
            self._steps.appendleft(Save(self._together_to, pieces))

    def save(self, step: int) -> str:
        """Record that a checkpoint contains all that was trained up to the boundary of ``step``.

        Returns why that cannot be put on record, or an empty string.
        """
        if step <= self._saved:
            return ""
        if step < self._together_to:
            return "more than %d steps were made since step %d" % (STEPS_APART, step)
        self._saved = step
        pieces: List[Piece] = []
        while self._steps and self._steps[0].step <= step:
            pieces += self._steps.popleft().pieces
        self.saves.append(Save(step, joined(pieces)))
        return ""

    def told(self, saves: List[Save]) -> None:
        """Note that the sidecar has put these saves on record."""
        self.saves = [save for save in self.saves if save not in saves]
        self.confirmed = max([self.confirmed] + [save.step for save in saves])

    def _count(self) -> None:
        """Record as trained what the loop was given since the last call."""
        in_hand = []
        for counted, shard in self._current:
            if shard.place > counted:
                self._since.append((counted, shard.place))
            if shard.place < shard.end:
                in_hand.append((shard.place, shard))
        self._current = in_hand


def joined(pieces: List[Piece]) -> List[Piece]:
    """Return the same places in fewer pieces."""
    fewer: List[Piece] = []
    for low, high in sorted(pieces):
        if fewer and fewer[-1][1] == low:
            fewer[-1] = (fewer[-1][0], high)
        else:
            fewer.append((low, high))
    return fewer
