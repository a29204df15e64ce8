# SPDX-License-Identifier: Apache-2.0
"""The two records of a torch rendezvous: one small key per node, one key for the round.

torch keeps the whole rendezvous in one blob that everybody rewrites. Here a join writes the
joiner's own key alone, so that any number of joins do not contend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, get_args

from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import dump_record, load_record, take
from rdzv.store import KeyValue

NodeState = Literal["asking", "in", "left"]
LeftReason = Literal["", "exit", "closed", "hung", "done"]
ClosedWhy = Literal["", "success", "failure"]

INT64_MAX = 2**63 - 1

ROUNDS_PER_LIFE = 1_000_000
"""What the rounds of each life of the job are numbered on by: far more than it ever has."""

_STATES = get_args(NodeState)
_LEFT_REASONS = get_args(LeftReason)
_CLOSED = get_args(ClosedWhy)


class Seat(NamedTuple):
    """Identity of one wish to take part.

    The connection's ``nonce`` tells a restarted torchrun from the one before it, which may have
    had the same address, pid and local id; ``ask`` grows with each join of one torchrun.
    """

    member: str
    nonce: str
    ask: int


@dataclass(frozen=True, slots=True)
class Node:
    """What one torchrun wants, as the sidecar that serves it wrote it.

    ``asking``: wants to take part. ``in``: was handed ``round``, and asks for nothing until it
    asks again; ``finished``: its workers are done, and it stands in that round's exit barrier.
    ``left``: a tombstone. ``addr``, ``pid`` and ``local_id`` are torch's own
    description; ranks are ordered by it. ``mod_revision`` is the store's.
    """

    member: str
    state: NodeState
    nonce: str
    ask: int
    addr: str
    pid: int
    local_id: int
    round: int = 0
    left_reason: LeftReason = ""
    flavour: str = ""
    mod_revision: int = 0
    finished: bool = False
    seat: Seat = field(init=False, repr=False, compare=False)
    """Who asks: what a frozen list names. Made once: every look at a run asks for all of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seat", Seat(self.member, self.nonce, self.ask))

    @property
    def rank_order(self) -> tuple[str, int, int, str]:
        """torch's order of ranks, and the member's name where two descriptions are equal."""
        return (self.addr, self.pid, self.local_id, self.member)

    def is_later_than(self, other: Node) -> bool:
        """Whether it is what became of ``other``, of the same torchrun."""
        same = (self.member, self.nonce) == (other.member, other.nonce)
        return same and self._progress > other._progress

    @property
    def _progress(self) -> tuple[int, int, bool]:
        """Orders what one torchrun goes through: each ask is handed a round, or ends."""
        return (self.ask, _STATES.index(self.state), self.finished)

    def to_json(self) -> bytes:
        """Encode for the store."""
        fields: dict[str, object] = {
            "state": self.state,
            "nonce": self.nonce,
            "ask": self.ask,
            "addr": self.addr,
            "pid": self.pid,
            "local_id": self.local_id,
        }
        if self.state == "in":
            fields["round"] = self.round
            if self.finished:
                fields["finished"] = True
        if self.state == "left":
            fields["left_reason"] = self.left_reason
        if self.flavour:
            fields["flavour"] = self.flavour
        return dump_record(fields)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        state: Any = fields.get("state")
        left_reason = fields.get("left_reason", "")
        if state not in _STATES or left_reason not in _LEFT_REASONS:
            raise RecordError(f"{kv.key}: no state of a node: {state!r} {left_reason!r}")
        return cls(
            member=last_name(kv.key),
            state=state,
            nonce=take(kv.key, fields, "nonce", str),
            ask=_count(kv.key, fields, "ask"),
            addr=take(kv.key, fields, "addr", str),
            pid=_count(kv.key, fields, "pid"),
            local_id=_count(kv.key, fields, "local_id"),
            round=_count(kv.key, fields, "round") if state == "in" else 0,
            left_reason=left_reason,
            flavour=take(kv.key, fields, "flavour", str) if "flavour" in fields else "",
            mod_revision=kv.mod_revision,
            finished=state == "in" and take(kv.key, fields, "finished", bool, False),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the rendezvous; a run begins with ``first_round``, which is not stored.

    ``frozen`` is the world in rank order once ``complete``. ``finishing`` says that an agent
    stands in the exit barrier, ``closed`` why no round will follow. ``former``: while it is open,
    the members of the world before it, whose places nobody else takes while they are here.
    ``restored``: it was written again after the store had lost it. What its nodes had stored for
    each other, such as the address to meet at, may be lost, so nobody enters it any more.
    ``restored_at``: the store's revision when that was found out; 0 where not known. What nodes
    have on record from up to then may be what the backup had, and be older than this round.
    """

    number: int = 0
    complete: bool = False
    closed: ClosedWhy = ""
    finishing: bool = False
    frozen: tuple[Seat, ...] = ()
    mod_revision: int = 0
    former: tuple[str, ...] = ()
    restored: bool = False
    restored_at: int = 0

    def is_world_of(self, node: Node) -> bool:
        """Whether ``node`` was handed this round, and not another one of that number.

        A store that lost a round may have given its number out once more before it was back.
        """
        handed = self.complete and (node.state, node.round) == ("in", self.number)
        return handed and node.seat in self.frozen

    def is_later_than(self, node: Node) -> bool:
        """Whether ``node`` is what a restored store had of a member before it got its place here.

        Else its torchrun, or another one, would have been seen to leave a world that trains on.
        """
        return node.mod_revision <= self.restored_at and any(
            seat.member == node.member and seat != node.seat for seat in self.frozen
        )

    @property
    def is_first(self) -> bool:
        """Whether it is the one that a run begins with."""
        return self.number % ROUNDS_PER_LIFE == 0

    @property
    def age(self) -> tuple[int, bool, bool, bool]:
        """Orders what one round can go through: of two records the greater is the later one."""
        return (self.number, self.complete, self.finishing, bool(self.closed))

    def to_json(self) -> bytes:
        """Encode for the store."""
        fields: dict[str, object] = {
            "round": self.number,
            "complete": self.complete,
            "closed": self.closed,
            "finishing": self.finishing,
            "frozen": self.frozen,
        }
        if self.former:
            fields["former"] = self.former
        if self.restored:
            fields["restored"] = True
            fields["restored_at"] = self.restored_at
        return dump_record(fields)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        closed: Any = fields.get("closed")
        if closed not in _CLOSED:
            raise RecordError(f"{kv.key}: 'closed' is {closed!r}, expected success or failure")
        frozen = tuple(_seat(kv.key, item) for item in take(kv.key, fields, "frozen", list))
        if len({seat.member for seat in frozen}) != len(frozen):
            raise RecordError(f"{kv.key}: a node is frozen twice")
        former = take(kv.key, fields, "former", list, [])
        if not all(isinstance(member, str) for member in former):
            raise RecordError(f"{kv.key}: 'former' is {former!r}, expected names of members")
        return cls(
            number=_count(kv.key, fields, "round"),
            complete=take(kv.key, fields, "complete", bool),
            closed=closed,
            finishing=take(kv.key, fields, "finishing", bool),
            frozen=frozen,
            mod_revision=kv.mod_revision,
            former=tuple(former),
            restored=take(kv.key, fields, "restored", bool, False),
            restored_at=_count(kv.key, fields, "restored_at") if "restored_at" in fields else 0,
        )


def first_round(generation: int) -> Round:
    """Make the round that a run begins with in ``generation``, which counts from 1.

    torch names what its agents tell each other by the number of the round. So no two lives of a
    job share one: an agent that comes from the former life would wait for what its world there
    never said, or read and write what is the present one's.
    """
    return Round((generation - 1) * ROUNDS_PER_LIFE)


def _count(key: str, fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is int and 0 <= value <= INT64_MAX:
        return value
    raise RecordError(f"{key}: {name!r} is {value!r}, expected a number from 0 on")


def _seat(key: str, item: object) -> Seat:
    match item:
        case [str(member), str(nonce), int(ask)] if not isinstance(ask, bool):
            return Seat(member, nonce, ask)
    raise RecordError(f"{key}: no node of a frozen list: {item!r}")
