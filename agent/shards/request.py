# SPDX-License-Identifier: Apache-2.0
"""One line of ``shards.sock``: the request of a rank, and the reply."""

from __future__ import annotations

import json
from typing import Self

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import take
from rdzv.records.shards import Intervals, Plan, Saved, places_of, saves_of

LINE_BYTES_MAX = 1 << 20
"""Bound on a line: a rank whose loop takes pieces from many places at once stays far below."""

PLACES_MAX = 1 << 62
NAME_LENGTH_MAX = 80
WHERE = "a request for shards"


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """The request of a rank; the fields are those that ``rdzv.shard_requests.Ask`` explains.

    ``name`` is the data set's. ``master`` names the rank's round of torchrun, and is empty for one
    that names its ``world`` itself.
    """

    name: str
    master: str
    world: str
    ranks: int
    local_rank: int
    plan: Plan
    start: int
    epoch: int
    left: Intervals
    used: Intervals
    saves: tuple[Saved, ...]
    want: int
    confirmed: int = 0

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Parse one line; raise ``RecordError`` if it is malformed."""
        try:
            fields = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{WHERE} is no JSON ({error})") from error
        if not isinstance(fields, dict):
            raise RecordError(f"{WHERE} is {type(fields).__name__}, expected an object")
        seed = fields.get("seed")
        plan = Plan(
            _number(fields, "size", 1),
            _number(fields, "shard_size", 1),
            None if seed is None else take(WHERE, fields, "seed", int),
        )
        name = take(WHERE, fields, "name", str)
        if not 0 < len(name) <= NAME_LENGTH_MAX:
            raise RecordError(f"{WHERE}: a name has 1 to {NAME_LENGTH_MAX} characters")
        return cls(
            name=name,
            master=take(WHERE, fields, "master", str, ""),
            world=take(WHERE, fields, "world", str, ""),
            ranks=_number(fields, "ranks", 1),
            local_rank=_number(fields, "local_rank", 0),
            plan=plan,
            start=_number(fields, "start", 0),
            epoch=_number(fields, "epoch", 0),
            left=places_of(WHERE, fields.get("left", [])),
            used=places_of(WHERE, fields.get("used", [])),
            saves=saves_of(WHERE, fields.get("saves", [])),
            want=_number(fields, "want", 0),
            confirmed=_number(fields, "confirmed", 0),
        )


@dataclass(frozen=True, slots=True)
class ShardReply:
    """The reply to a rank.

    ``wait``: why there is no answer now, so that the rank asks again. ``lost``: why nothing that it
    does counts any more. ``refused``: its user's mistake. ``batch_s`` is how many seconds of work a
    rank should ask for at once, which limits the rate at which all of them write to the store.
    """

    given: Intervals = ()
    done: bool = False
    wait: str = ""
    lost: str = ""
    refused: str = ""
    batch_s: float = 0.0

    def line(self) -> bytes:
        """Encode the reply as one line of JSON."""
        return (
            json.dumps(
                {
                    "given": self.given,
                    "done": self.done,
                    "wait": self.wait,
                    "lost": self.lost,
                    "refused": self.refused,
                    "batch_s": self.batch_s,
                },
                separators=(",", ":"),
            ).encode()
            + b"\n"
        )


def _number(fields: dict[str, object], name: str, least: int) -> int:
    """Take one number of at least ``least``; one that is counted from 0 may be left out."""
    value = take(WHERE, fields, name, int, None if least else 0)
    if not least <= value <= PLACES_MAX:
        raise RecordError(f"{WHERE}: {name!r} is {value}, expected a number from {least} on")
    return value
