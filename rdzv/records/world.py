# SPDX-License-Identifier: Apache-2.0
"""The records of a world that changes in place: the change under way, and each pod's report.

A *world* is what ranks are in, a *round* what a torchrun believes. The world that has formed is in
the round's record (its seats, and its number); the change to the next one is here.
"""

from __future__ import annotations

from typing import Literal, Self

from rdzv.dataclass import dataclass
from rdzv.keys import last_name
from rdzv.records.codec import Count, decode_record, encode
from rdzv.store import KeyValue

WorldPhase = Literal["idle", "train", "hold", "form", "broken", "fall-back"]
"""``idle``: no world has formed in this round yet. ``train``: one has, and no change is under way.
``hold``: its ranks stop at a boundary, in memory. ``form``: ranks meet in world ``number``.
``broken``: its group is given up, or that of the world before it. ``fall-back``: changes of this
round are today's, with a save and a restart."""


@dataclass(frozen=True, slots=True)
class WorldChange:
    """The newest change of a run's world; one record for all causes, so that two become one."""

    epoch: Count = 0
    """Grows with each write."""
    phase: WorldPhase = "idle"
    round: Count = 0
    """The round that it is about."""
    number: Count = 0
    """The newest world that ranks were ever asked to form; never used for another attempt."""
    step: int | None = None
    """``hold``: the boundary at which all stop; None while they vote. ``form``: the step whose
    state all have afterwards."""
    seats: tuple[str, ...] = ()
    """``form``: members of the world to form, in rank order."""
    sizes: tuple[int, ...] = ()
    """``form``: their numbers of ranks."""
    source: str = ""
    """``form``: the member of the rank that holds the state at ``step``."""
    holder: Count = 0
    """Its local rank."""
    attempts: Count = 0
    """The attempts of this change that have failed."""
    reason: str = ""
    mod_revision: int = 0

    def first_rank(self, member: str) -> int:
        """Return the rank of the first local rank of ``member`` in the world to form."""
        return sum(self.sizes[: self.seats.index(member)])

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, ("epoch", "phase"))


@dataclass(frozen=True, slots=True)
class WorldReport:
    """The state of the ranks of one pod in their world, as far as all of them agree on it."""

    member: str
    ranks: Count = 0
    """The number of its ranks that report; 0 for a pod whose script takes no part."""
    seat: str = ""
    """The torchrun's request for a place that they were started for."""
    torch: str = ""
    """The release of torch that they run."""
    number: int = -1
    """The formed world that they are in; -1 for none."""
    epoch: Count = 0
    """The change that they have obeyed."""
    step: int = -1
    """Their highest whole step, while a change is under way; -1 if none holds a whole state."""
    holder: Count = 0
    """The first local rank that holds it."""
    ready: bool = False
    """Whether they wait to be taken in."""
    vote: int | None = None
    """The first boundary that none of them can have passed, in the epoch of ``voted``."""
    voted: Count = 0
    held: Count = 0
    """The epoch in which all of them stand at their boundary."""
    formed: Count = 0
    """The world in which all of them are, with its state."""
    broken: Count = 0
    """The world of which one of them has seen a collective fail."""
    failed: Count = 0
    """The world that one of them could not form, for ``why``."""
    why: str = ""
    over: bool = False
    """Whether one of them has ended its training well."""
    plain: bool = False
    """Whether one of its ranks makes steps without taking part."""
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, without=("member",), sparse=_SPARSE)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, member=last_name(kv.key))


_SPARSE = (
    *("holder", "vote", "voted", "held", "formed", "broken", "failed", "why", "over"),
    *("ready", "plain"),
)
