# SPDX-License-Identifier: Apache-2.0
"""The two records of a torch rendezvous: one small key per node, one key for the round.

torch keeps the whole rendezvous in one blob that every node rewrites. Here a join writes the
joiner's own key alone, so that any number of joins do not contend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, get_args

from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import dump_record, load_record, take, take_seconds
from rdzv.records.round_number import ROUNDS_PER_LIFE, shown_round
from rdzv.store import KeyValue

NodeState = Literal["asking", "in", "left"]
LeftReason = Literal["", "exit", "closed", "hung", "done"]
ClosedWhy = Literal["", "success", "failure"]
Progress = Literal["", "loads", "steps", "mute"]

INT64_MAX = 2**63 - 1

LOST = "it has lost "
"""The begin of the sentence why a world ends that has lost nodes; their names follow."""

_STATES = get_args(NodeState)
_LEFT_REASONS = get_args(LeftReason)
_CLOSED = get_args(ClosedWhy)
_PROGRESS = get_args(Progress)


class Seat(NamedTuple):
    """Identity of one request for a place."""

    member: str
    nonce: str
    """Name of the connection: a restarted torchrun may have the address, pid and local id of the
    one before it."""
    ask: int
    """Number of the request: grows with each join of one torchrun."""


@dataclass(frozen=True, slots=True)
class Node:
    """One torchrun's request or place, as written by the sidecar that serves it."""

    member: str
    state: NodeState
    """``asking``: wants a place in a round. ``in``: has one in ``round``. ``left``: a tombstone."""
    nonce: str
    """Name of the connection; see ``Seat``."""
    ask: int
    """The number of times that this torchrun has asked; see ``Seat``."""
    addr: str
    """With ``pid`` and ``local_id``, torch's description of the node."""
    pid: int
    local_id: int
    round: int = 0
    """The round that the node is ``in``."""
    left_reason: LeftReason = ""
    """``exit``: torch took the node off. ``closed``: its connection ended, or it closed the run.
    ``hung``: its sidecar gave it up. ``done``: its workers had finished."""
    flavour: str = ""
    """The encoding of a state by its torch (``launcher_shim.c10d.torch.agent.spell_flavour``)."""
    mod_revision: int = 0
    """The store's revision of the record; 0 before it is stored."""
    finished: bool = False
    """Whether its workers are done, so that it waits in the exit barrier of ``round``."""
    silent: bool = False
    """Whether it sends no request though its ranks train: its world saves before it goes on without
    it."""
    seat: Seat = field(init=False, repr=False, compare=False)
    """Its entry in a frozen list. Created once, as every evaluation reads all of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seat", Seat(self.member, self.nonce, self.ask))

    @property
    def rank_order(self) -> tuple[str, int, int, str]:
        """The sort key of torch's order of ranks, with the member's name as a tie-breaker.

        It decides if the module ``rank_order`` has no reason for another order.
        """
        return (self.addr, self.pid, self.local_id, self.member)

    def is_later_than(self, other: Node) -> bool:
        """Return whether it is a later record than ``other`` of the same torchrun."""
        same = (self.member, self.nonce) == (other.member, other.nonce)
        return same and self._progress > other._progress

    @property
    def _progress(self) -> tuple[int, int, bool]:
        """A sort key for the records of one torchrun: each ask gets a round, or ends."""
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
            if self.silent:
                fields["silent"] = True
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
            silent=state == "in" and take(kv.key, fields, "silent", bool, False),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the rendezvous; a run begins with ``first_round``, which is not stored."""

    number: int = 0
    complete: bool = False
    """Whether ``frozen`` is fixed."""
    closed: ClosedWhy = ""
    """The reason why no round will follow; empty while one may."""
    finishing: bool = False
    """Whether an agent waits in the exit barrier."""
    frozen: tuple[Seat, ...] = ()
    """The world in rank order, once ``complete``."""
    mod_revision: int = 0
    """The store's revision of the record; 0 before it is stored."""
    former: tuple[str, ...] = ()
    """While the round is open: members of the world before it, in rank order. As long as they are
    here, no other node takes their places."""
    restored: bool = False
    """Whether the store had lost it, and it was written again, or has lost keys of it. Keys that
    its nodes had stored for each other, such as the master's address, may be gone, so no node
    enters it any more, and none in it waits for such a key."""
    restored_at: int = 0
    """The store's revision at which the loss was noticed; 0 if unknown. Node records up to that
    revision may come from the backup and be older than this round."""
    ends: str = ""
    """The reason why its world must form again, in one sentence; empty while it trains on. Nothing
    withdraws it, and no world is left without it: a store that takes no writes costs none."""
    progress: Progress = ""
    """The progress of the world's ranks. ``loads``: they have imported Muster, and made no step
    yet. ``steps``: they have made their first one. ``mute``: they import it, but report no steps;
    so for the worlds after it. Empty: they have reported nothing."""
    start_s: float = 0.0
    """Seconds from a round's completion to the first step of its ranks, of the newest world that
    made one, or for which newcomers waited in vain; 0 if none has."""
    failed_starts: int = 0
    """Number of worlds in a row, up to the one before, that ended by a failure before their first
    step."""
    waits: int = 0
    """Number of worlds in a row that waited for such failures; this one counts once complete."""

    def is_world_of(self, node: Node) -> bool:
        """Return whether ``node`` has a place in this round, not in another of that number."""
        handed = self.complete and (node.state, node.round) == ("in", self.number)
        return handed and node.seat in self.frozen

    def is_later_than(self, node: Node) -> bool:
        """Return whether ``node`` is a backup's record, from before its member's place here.

        If such a record counted, a torchrun would seem to have left a world that trains on.
        """
        return node.mod_revision <= self.restored_at and any(
            seat.member == node.member and seat != node.seat for seat in self.frozen
        )

    @property
    def is_ending(self) -> bool:
        """Whether its world must leave it and form again, because the store says so."""
        return self.complete and self.closed != "success" and bool(self.ends or self.closed)

    @property
    def shown(self) -> int:
        """Its number for people: the first round of each life of the job has 0."""
        return shown_round(self.number)

    @property
    def is_first(self) -> bool:
        """Whether it is the first round of a run."""
        return self.shown == 0

    @property
    def age(self) -> tuple[int, bool, bool, bool, bool]:
        """A sort key for the records of one round: the greater one is the later one."""
        return (self.number, self.complete, self.finishing, bool(self.closed), bool(self.ends))

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
        if self.ends:
            fields["ends"] = self.ends
        if self.progress:
            fields["progress"] = self.progress
        if self.start_s:
            fields["start_s"] = self.start_s
        if self.failed_starts:
            fields["failed_starts"] = self.failed_starts
        if self.waits:
            fields["waits"] = self.waits
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
        progress: Any = fields.get("progress", "")
        if progress not in _PROGRESS:
            raise RecordError(f"{kv.key}: 'progress' is {progress!r}, expected one of {_PROGRESS}")
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
            ends=take(kv.key, fields, "ends", str, ""),
            progress=progress,
            start_s=take_seconds(kv.key, fields, "start_s") if "start_s" in fields else 0.0,
            failed_starts=_count(kv.key, fields, "failed_starts")
            if "failed_starts" in fields
            else 0,
            waits=_count(kv.key, fields, "waits") if "waits" in fields else 0,
        )


def first_round(generation: int) -> Round:
    """Return the round that a run begins with in ``generation``, which counts from 1.

    torch's agents exchange keys that are named by the round's number. So no two generations share
    a number: an agent from the former generation would wait for keys that no agent sets, or read
    and write those of the present world.
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
