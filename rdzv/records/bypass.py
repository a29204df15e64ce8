# SPDX-License-Identifier: Apache-2.0
"""The record of a launcher that bypasses its sidecar, or whose options are not its sidecar's.

It is one small key on the member's lease, and only while something is wrong. No snapshot has it, so
that no decision rests on it, and it wakes no reader.
"""

from __future__ import annotations

from typing import Literal, Self, cast, get_args

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import dump_record, load_record, take
from rdzv.store import KeyValue

Kind = Literal["", "unseen", "absent", "elsewhere", "run_id", "nnodes", "slots", "plain"]
"""The fault. ``unseen``: nothing is known of the training container yet. ``absent``: it runs, and
its launcher has not connected. ``elsewhere``: the launcher was given another rendezvous.
``run_id``: it asks for another run than the others. ``nnodes``: its ``--nnodes`` is not its
sidecar's. ``slots``: it started another number of workers than its sidecar's slots. ``plain``:
with ``MUSTER_WARM`` some start without the zygote."""

REMARKS: frozenset[Kind] = frozenset({"slots", "plain"})
"""The kinds that are no fault: the launcher takes part as it should."""

KINDS: tuple[Kind, ...] = get_args(Kind)
SENTENCE_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Bypass:
    """The fault of one member's launcher; empty if there is none.

    The sentence is one line of bounded length, whatever was quoted in it. ``slots``: the number of
    workers that it started if that is not its sidecar's, else 0; a fault of another kind may have
    it, too.
    """

    kind: Kind = ""
    sentence: str = ""
    slots: int = 0

    def __post_init__(self) -> None:
        line = "".join(c if c.isprintable() else "?" for c in self.sentence[:SENTENCE_LENGTH])
        object.__setattr__(self, "sentence", line)

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        fields: dict[str, object] = {"kind": self.kind, "sentence": self.sentence}
        if self.slots:
            fields["slots"] = self.slots
        return dump_record(fields)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        if fields.get("kind") not in KINDS[1:]:
            raise RecordError(f"{kv.key}: 'kind' is {fields.get('kind')!r}, expected {KINDS[1:]}")
        return cls(
            cast(Kind, fields["kind"]),
            take(kv.key, fields, "sentence", str),
            max(0, take(kv.key, fields, "slots", int, 0)),
        )
