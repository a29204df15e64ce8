# SPDX-License-Identifier: Apache-2.0
"""The positions of a stream in a checkpoint: one file for each rank, and all of them read by each.

Shards are named by their place in the order of the epoch. What the files of one save say together
is all that it takes to go on, in a world of any size.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Sequence, Tuple

from muster.shard_log import joined


class Positions(NamedTuple):
    """The part of an epoch in the weights: shards read to their end, and states of those begun."""

    epoch: int
    ended: FrozenSet[int]
    begun: Mapping[int, Any]


class StreamSave(NamedTuple):
    """The fields that all files of one save share."""

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


def write(path: str, save: StreamSave, rank: int, positions: Positions) -> None:
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


def read(folder: str, name: str) -> Tuple[StreamSave, Positions]:
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
