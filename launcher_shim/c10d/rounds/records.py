# SPDX-License-Identifier: Apache-2.0
"""The two records of a torch rendezvous: one small key per node, one key for the round.

torch keeps the whole rendezvous in one blob that every node rewrites. Here a join writes the
joiner's own key alone, so that any number of joins do not contend.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import field
from hashlib import sha256
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from launcher_shim.tcpstore.wire import NOTE_MAX
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import Count, Seconds, decode, encode, load_record, take, take_count
from rdzv.records.job import ROUNDS_PER_LIFE, shown_round
from rdzv.store import KeyValue

NodeState = Literal["asking", "in", "left"]
LeftReason = Literal["", "exit", "closed", "hung", "done"]
ClosedWhy = Literal["", "success", "failure"]
Progress = Literal["", "loads", "steps", "mute"]

LOST = "it has lost "
"""The begin of the sentence why a world ends that has lost nodes; their names follow."""

_STATES = get_args(NodeState)


class Seat(NamedTuple):
    """Identity of one request for a place."""

    member: str
    nonce: str
    """Name of the connection: a restarted torchrun may have the address, pid and local id of the
    one before it."""
    ask: int
    """Number of the request: grows with each join of one torchrun."""


def _take_seats(key: str, fields: Mapping[str, Any], name: str) -> tuple[Seat, ...]:
    seats: dict[str, Seat] = {}
    for item in take(key, fields, name, list):
        match item:
            case [str(member), str(nonce), int(ask)] if not isinstance(ask, bool):
                seats[member] = Seat(member, nonce, ask)
            case _:
                raise RecordError(f"{key}: no node of a frozen list: {item!r}")
    if len(seats) < len(fields[name]):
        raise RecordError(f"{key}: a node is frozen twice")
    return tuple(seats.values())


@dataclass(frozen=True, slots=True)
class Node:
    """One torchrun's request or place, as written by the sidecar that serves it."""

    member: str
    state: NodeState
    """``asking``: wants a place in a round. ``in``: has one in ``round``. ``left``: a tombstone."""
    nonce: str
    """Name of the connection; see ``Seat``."""
    ask: Count
    """The number of times that this torchrun has asked; see ``Seat``."""
    addr: str
    """With ``pid`` and ``local_id``, torch's description of the node."""
    pid: Count
    local_id: Count
    round: Count = 0
    """The round that the node is ``in``."""
    left_reason: LeftReason = ""
    """``exit``: torch took the node off. ``closed``: its connection ended, or it closed the run.
    ``hung``: its sidecar gave it up. ``done``: its workers had finished."""
    flavour: str = ""
    """The encoding of a state by its torch (``launcher_shim.c10d.state_codec.spell_flavour``)."""
    mod_revision: int = 0
    """The store's revision of the record; 0 before it is stored."""
    finished: bool = False
    """Whether its workers are done, so that it waits in the exit barrier of ``round``."""
    silent: bool = False
    """Whether it sends no request though its ranks train: its world saves before it goes on without
    it."""
    own: bool = False
    """Whether ``round`` is one of its own, which no other torchrun is in: its ranks join a world
    that changes in place."""
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
        without = ("member", "mod_revision", *_WITHOUT[self.state])
        return encode(self, without=without, sparse=("finished", "silent", "flavour", "own"))

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        known: dict[str, Any] = {"member": last_name(kv.key), "mod_revision": kv.mod_revision}
        if fields.get("state") != "in":
            known |= {"round": 0, "finished": False, "silent": False, "own": False}
        return decode(cls, kv.key, fields, ("round",), **known)


_WITHOUT: Mapping[NodeState, tuple[str, ...]] = {
    "asking": ("round", "finished", "silent", "own", "left_reason"),
    "in": ("left_reason",),
    "left": ("round", "finished", "silent", "own"),
}
"""The fields that the record of a node in a state does not have."""


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
    frozen: Annotated[tuple[Seat, ...], _take_seats] = ()
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
    restored_at: Count = 0
    """The store's revision at which the loss was noticed; 0 if unknown. Node records up to that
    revision may come from the backup and be older than this round."""
    ends: str = ""
    """The reason why its world must form again, in one sentence; empty while it trains on. Nothing
    withdraws it, and no world is left without it: a store that takes no writes costs none."""
    progress: Progress = ""
    """The progress of the world's ranks. ``loads``: they have imported Muster, and made no step
    yet. ``steps``: they have made their first one. ``mute``: they import it, but report no steps;
    so for the worlds after it. Empty: they have reported nothing."""
    start_s: Seconds = 0.0
    """Seconds from a round's completion to the first step of its ranks, of the newest world that
    made one, or for which newcomers waited in vain; 0 if none has."""
    failed_starts: Count = 0
    """Number of worlds in a row, up to the one before, that ended by a failure before their first
    step."""
    waits: Count = 0
    """Number of worlds in a row that waited for such failures; this one counts once complete."""
    world: Count = 0
    """Number of the world that its ranks have formed in place, whose seats ``frozen`` has since; 0
    if they are in the one that torchrun started."""
    began: Annotated[tuple[Seat, ...], _take_seats] = ()
    """The seats with which it was complete, which its torchruns are shown for ever; empty while
    ``frozen`` is still the same."""

    def is_world_of(self, node: Node) -> bool:
        """Return whether ``node`` has a place in this round, not in another of that number."""
        handed = self.complete and node.state == "in" and (node.own or node.round == self.number)
        return handed and node.seat in self.frozen

    def takes_in(self, node: Node) -> bool:
        """Return whether ``node`` is in a round of its own, beside a world that may take it in."""
        trains = self.complete and self.world > 0 and not self.closed and not self.ends
        return trains and node.state == "in" and node.own

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
        without = ("number", "mod_revision")
        return encode(self, without=without, sparse=_OF_LATER_VERSIONS, round=self.number)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        number, required = take_count(kv.key, fields, "round"), _OF_ALL_VERSIONS
        return decode(cls, kv.key, fields, required, number=number, mod_revision=kv.mod_revision)


_OF_ALL_VERSIONS = ("complete", "closed", "finishing", "frozen")
_OF_LATER_VERSIONS = (
    *("former", "restored", "restored_at", "ends", "progress", "start_s"),
    *("failed_starts", "waits", "world", "began"),
)


OWN_ROUNDS = 10**17
"""The least number of a round of a torchrun's own: above those of all real rounds, and with the
most digits that a number in torch's keys has here."""


def own_round(seat: Seat) -> int:
    """Return the number of the round that one request for a place gets for itself.

    torch's agents name keys by it, and the store may be restored to an earlier revision: no two
    requests ever share one.
    """
    drawn = int.from_bytes(sha256("/".join(map(str, seat)).encode()).digest()[:7], "big")
    return OWN_ROUNDS + drawn


def first_round(generation: int) -> Round:
    """Return the round that a run begins with in ``generation``, which counts from 1.

    torch's agents exchange keys that are named by the round's number. So no two generations share
    a number: an agent from the former generation would wait for keys that no agent sets, or read
    and write those of the present world.
    """
    return Round((generation - 1) * ROUNDS_PER_LIFE)


log = logging.getLogger(__name__)

SEATS_MAX = 128
"""Maximum number of seats of a world in a note: with more, it would be too long."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sidecar's memory of one client, in the note that its relay keeps.

    Of the note's node and the node record in the store, the later one counts.
    """

    run_id: str
    """The run that the client takes part in."""
    generation: int
    """The generation of that run."""
    node: Node | None = None
    """The client's node, if it has one."""
    finished_round: int = -1
    """The round whose exit barrier its agent has reached."""
    world: Round | None = None
    """The round that it is in, if a note has room for it: a restored store gets it from here if no
    sidecar is left that has seen it."""

    def encode(self) -> bytes:
        """Encode for the relay."""
        others, more = ("node", "world"), dict[str, str]()
        if self.node is not None:
            more = {"member": self.node.member, "node": self.node.to_json().decode()}
        if self.world is not None and len(self.world.frozen) <= SEATS_MAX:
            whole = encode(self, without=others, world=self.world.to_json().decode(), **more)
            if len(whole) <= NOTE_MAX:
                return whole
        return encode(self, without=others, **more)

    @classmethod
    def read(cls, content: bytes) -> Self | None:
        """Decode; None if the client took part in no run, or the note cannot be read."""
        if not content:
            return None
        name = "a relay's note"
        try:
            fields = load_record(name, content)
            node = None
            if "node" in fields:
                member = take(name, fields, "member", str)
                record = take(name, fields, "node", str).encode()
                node = Node.from_kv(KeyValue(member, record, 0, 0, 0, 0))
            world = None
            if "world" in fields:
                record = take(name, fields, "world", str).encode()
                world = Round.from_kv(KeyValue(name, record, 0, 0, 0, 0))
            return decode(cls, name, fields, ("finished_round",), node=node, world=world)
        except RecordError as error:
            log.warning("taking a client that reconnects for a new one: %s", error)
            return None
