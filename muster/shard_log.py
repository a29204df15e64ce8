# SPDX-License-Identifier: Apache-2.0
"""The shards of a data set that a rank has: its log of them, and its connection to the sidecar.

Places in the log are counted along one line, the epochs one after the other; records given to the
loop count as trained with the step whose boundary it comes to next. In a checkpoint are the
positions of each rank, and each reads them all.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from contextlib import suppress
from typing import (
    Any,
    Deque,
    Dict,
    FrozenSet,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from muster.orders import ShardOrder

Piece = Tuple[int, int]

STEPS_APART = 10_000
"""The number of newest steps, at least, whose records are known step by step; a save reported later
than that does not count. Each step takes some 200 bytes."""

SOCKET_NAME = "shards.sock"

ANSWER_TIMEOUT_S = 15.0
"""Timeout of an answer. The sidecar replies within 5 s that it cannot answer now; after a longer
silence it is gone or frozen."""


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


class Positions(NamedTuple):
    """The part of an epoch in the weights: shards read to their end, and states of those begun."""

    epoch: int
    ended: FrozenSet[int]
    begun: Mapping[int, Any]


class StreamSave(NamedTuple):
    """The fields that all files of one save share.

    Shards are named by their place in the order of the epoch. What the files of one save say
    together is all that it takes to go on, in a world of any size.
    """

    epoch: int
    step: int
    ranks: int
    shards: int
    seed: Any
    tag: str

    @property
    def cursor(self) -> Dict[str, Any]:
        """The reference from a commit to the files."""
        cursor = dict(self._asdict())
        del cursor["tag"]  # a part of the commit already
        return cursor


def share(positions: Positions, shards: int, number: int, of: int) -> List[int]:
    """Return the places that part ``number`` of the world reads: those begun come first."""
    untouched = (
        place
        for place in range(shards)
        if place not in positions.ended and place not in positions.begun
    )
    return [*sorted(positions.begun), *untouched][number::of]


def path_of(folder: str, name: str, rank: int) -> str:
    """Return the path of one rank's file."""
    return os.path.join(folder, "%s-%05d.json" % (name, rank))


def write_positions(path: str, save: StreamSave, rank: int, positions: Positions) -> None:
    """Write one rank's file aside and rename it; raises ``OSError``."""
    pieces = joined([(place, place + 1) for place in positions.ended])
    fields = {
        **save._asdict(),
        "rank": rank,
        "ended": pieces,
        "begun": {"%d" % place: state for place, state in sorted(positions.begun.items())},
    }
    aside = "%s.%d.part" % (path, os.getpid())
    try:
        with open(aside, "w", encoding="ascii") as file:
            json.dump(fields, file, separators=(",", ":"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)


def read_positions(folder: str, name: str) -> Tuple[StreamSave, Positions]:
    """Read the files of all ranks of one save.

    Raises ``ValueError`` if one is missing, or they do not belong together.
    """
    first, positions = _read_one(folder, name, 0)
    found = [positions]
    for rank in range(1, first.ranks):
        save, positions = _read_one(folder, name, rank)
        if save != first:
            raise ValueError(
                "%s is of step %d in a world of %d (%s), and rank 0's of step %d in a world of %d"
                " (%s): they are not of one save; load a checkpoint that all ranks have saved, each"
                " in a folder of its own"
                % (
                    path_of(folder, name, rank),
                    *(save.step, save.ranks, save.tag),
                    *(first.step, first.ranks, first.tag),
                )
            )
        found.append(positions)
    return first, _merged(found, folder)


def _read_one(folder: str, name: str, rank: int) -> Tuple[StreamSave, Positions]:
    path = path_of(folder, name, rank)
    try:
        with open(path, encoding="ascii") as file:
            fields = json.load(file)
        save = StreamSave(*(fields[field] for field in StreamSave._fields))
        ended = frozenset(place for low, high in fields["ended"] for place in range(low, high))
        begun = {int(place): state for place, state in fields["begun"].items()}
        of, positions = fields["rank"], Positions(save.epoch, ended, begun)
    except FileNotFoundError:
        raise ValueError(
            "%s is missing: every rank saves its positions, by stream.save(folder, step), into a"
            " folder that all pods share, and a script that begins anew loads none" % path
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError("%s has no positions of a stream: %r" % (path, error)) from error
    if of != rank:
        raise ValueError("%s has the positions of rank %r, not of rank %d" % (path, of, rank))
    return save, positions


def _merged(found: Sequence[Positions], folder: str) -> Positions:
    ended: FrozenSet[int] = frozenset().union(*(one.ended for one in found))
    begun: Dict[int, Any] = {}
    for one in found:
        twice = one.begun.keys() & (begun.keys() | ended)
        if twice:
            raise ValueError(
                "the positions in %s name shards twice, at the places %s" % (folder, sorted(twice))
            )
        begun.update(one.begun)
    return Positions(found[0].epoch, ended, begun)


class ShardLine:
    """One rank's connection, made again whenever it is lost: requests may be repeated."""

    def __init__(self, run_dir: str) -> None:
        self._path = os.path.join(run_dir, SOCKET_NAME)
        self._socket: Optional[socket.socket] = None
        self._rest = b""

    def ask(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Send a request and return the answer; raises ``OSError`` if the sidecar is not there."""
        try:
            return self._ask(json.dumps(request, separators=(",", ":")).encode("ascii") + b"\n")
        except (OSError, ValueError) as error:
            self.close()
            if isinstance(error, OSError):
                raise
            raise OSError("the sidecar's answer is none: %s" % error) from error

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._rest = None, b""

    def _ask(self, line: bytes) -> Dict[str, Any]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(ANSWER_TIMEOUT_S)
            self._socket.connect(self._path)
        self._socket.sendall(line)
        while b"\n" not in self._rest:
            more = self._socket.recv(1 << 16)
            if not more:
                raise ConnectionResetError("the sidecar has closed the connection")
            self._rest += more
        answer, _, self._rest = self._rest.partition(b"\n")
        fields = json.loads(answer.decode("utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("%r" % (fields,))
        return fields
