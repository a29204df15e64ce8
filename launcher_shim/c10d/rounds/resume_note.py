# SPDX-License-Identifier: Apache-2.0
"""The note that a relay keeps for the next sidecar, so that it resumes where this one ended."""

from __future__ import annotations

import logging
from typing import Self

from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.tcpstore.wire import NOTE_MAX
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import decode, encode, load_record, take
from rdzv.store import KeyValue

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
