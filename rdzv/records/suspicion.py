# SPDX-License-Identifier: Apache-2.0
"""The records of a member's idle connections: a suspicion that another member is lost, and which
ones it never reached.

A suspicion hangs on the lease of the member that suspects, and names the incarnation that it
suspects. No snapshot has it, so that it wakes no other reader.
"""

from __future__ import annotations

from typing import Literal, Self, cast, get_args

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import dump_record, load_record, take, take_name
from rdzv.store import KeyValue

Sign = Literal["silent", "refused"]
"""The sign of the loss. ``silent``: nothing answers there any more, the kernel included.
``refused``: the machine answers that no sidecar listens."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """The neighbours that a member never reached: the loss of their machines is seen late.

    It hangs on the member's lease, and is there only while there are such neighbours.
    """

    members: tuple[str, ...]

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return dump_record({"members": list(self.members)})

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        members = take(kv.key, load_record(kv.key, kv.value), "members", list)
        if not all(isinstance(name, str) for name in members):
            raise RecordError(f"{kv.key}: 'members' is {members!r}, expected names of members")
        return cls(tuple(members))


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One suspicion; ``lease``, ``key`` and ``mod_revision`` are those of its record."""

    by: str
    member: str
    incarnation: int
    sign: Sign
    key: str = ""
    lease: int = 0
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return dump_record(
            {"member": self.member, "incarnation": self.incarnation, "sign": self.sign}
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        if fields.get("sign") not in get_args(Sign):
            raise RecordError(f"{kv.key}: 'sign' is {fields.get('sign')!r}, which is none")
        return cls(
            by=last_name(kv.key),
            member=take_name(kv.key, fields, "member"),
            incarnation=take(kv.key, fields, "incarnation", int),
            sign=cast(Sign, fields["sign"]),
            key=kv.key,
            lease=kv.lease,
            mod_revision=kv.mod_revision,
        )
