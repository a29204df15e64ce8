# SPDX-License-Identifier: Apache-2.0
"""The records of a member's troubles: its workers' newest failure, a sidecar that is bypassed.

Each is one small key on the member's lease, and goes with the pod. No snapshot has it, so that no
decision rests on it and it wakes no reader.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, Self, get_args

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import Ordinal, UnixTime, decode_record, encode, taking
from rdzv.store import KeyValue

TEXT_MAX = 300
"""The longest text of an error, in characters."""
BRIEF_MAX = 100
"""The longest text of an error in a line of other things, in characters."""
HOST_NAME_MAX = 100
"""The longest name of an exception, and place in a script, in characters."""

_PLACE = re.compile(r"\[(enforce fail at )?/\S+:\d+\] ?")
"""A place in the source of a library, as Gloo begins its errors with."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure: what ended the workers of ``member`` in round ``round`` of ``run``.

    ``rank``: -1 if unknown. ``kind``: the exception's type; empty if none was raised. ``where``:
    ``FILE:LINE`` of the script. ``follows``: the end of another rank is its cause. ``count``: the
    number of failures in a row, of worlds without progress, up to this one.

    No snapshot has it: it wakes no reader, and matters only to a job that cannot start.
    """

    member: str
    run: str
    round: int
    rank: int = -1
    kind: str = ""
    text: str = ""
    where: str = ""
    count: Ordinal = 1
    at_unix_s: UnixTime = 0.0
    follows: bool = False
    mod_revision: int = 0

    def __post_init__(self) -> None:
        for name, most in (("kind", HOST_NAME_MAX), ("text", TEXT_MAX), ("where", HOST_NAME_MAX)):
            text = getattr(self, name)[:most]
            line = "".join(c if c.isprintable() else " " for c in text)
            object.__setattr__(self, name, line)

    @property
    def error(self) -> str:
        """The error in one line: ``RuntimeError: out of memory (train.py:31)``."""
        if not self.kind:
            return self.text
        place = f" ({self.where})" if self.where else ""
        return f"{self.kind}: {self.text}{place}" if self.text else f"{self.kind}{place}"

    @property
    def brief_error(self) -> str:
        """The error for a line of other things: without the place in a library, and cut."""
        text = _PLACE.sub("", self.text)
        if len(text) > BRIEF_MAX:
            text = f"{text[: BRIEF_MAX - 1].rstrip()}…"
        return replace(self, text=text).error

    @property
    def sentence(self) -> str:
        """The failure in one sentence, with its number in a row."""
        return self._said(self.error)

    @property
    def brief(self) -> str:
        """The sentence with the brief error."""
        return self._said(self.brief_error)

    def _said(self, error: str) -> str:
        who = f"rank {self.rank}: " if self.rank >= 0 else ""
        often = f", {ordinal(self.count)} in a row" if self.count > 1 else ""
        return f"{who}{error}{often}"

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        at_unix_s = round(self.at_unix_s, 3)
        return encode(self, without=("member",), sparse=("follows",), at_unix_s=at_unix_s)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        required = ("rank", "kind", "text", "where", "count")
        return decode_record(cls, kv, required, member=last_name(kv.key))


def after(
    failure: Failure, records: Mapping[str, Failure], *, progressed: bool
) -> tuple[Failure | None, str]:
    """Return the record to write for a new failure, None for none, and the reason.

    ``records``: those of all members. ``progressed``: whether its world had made progress, so that
    it is not counted with those before it.
    """
    place, before = (failure.run, failure.round), records.get(failure.member)
    if failure.follows:
        others = [one for name, one in records.items() if name != failure.member]
        first = [one for one in others if (one.run, one.round) == place and not one.follows]
        if first:
            return None, f"it follows the failure of {first[0].member}"
    if before is None or before.run != failure.run or progressed:
        return failure, "the first failure"
    if before.round == failure.round:
        return None, "its round has a failure on record already"
    count = before.count + 1
    return replace(failure, count=count), f"the {ordinal(count)} failure in a row"


def is_alike(failure: Failure, records: Mapping[str, Failure]) -> bool:
    """Return whether another member's workers have failed with the same error in the same round.

    ``records``: those of all members. The round may have ended for that one's sake before the
    workers here failed, too: it would have ended for these as well.
    """
    place = (failure.run, failure.round, failure.kind, failure.where)
    return not failure.follows and any(
        (one.run, one.round, one.kind, one.where) == place and not one.follows
        for name, one in records.items()
        if name != failure.member
    )


def is_told(failure: Failure) -> bool:
    """Return whether history takes a failure: the first three in a row, and then each doubling.

    A crash loop would otherwise push all else out of it.
    """
    return failure.count <= 3 or failure.count & (failure.count - 1) == 0


def ordinal(number: int) -> str:
    """Spell a number as ``1st``, ``2nd``, ``3rd``, ``11th``."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{_ENDINGS.get(number % 10, 'th')}"


_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


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

    It is one small key on the member's lease, and only while something is wrong. No snapshot
    has it, so that no decision rests on it, and it wakes no reader.
    """

    kind: Kind = ""
    sentence: str = ""
    slots: Annotated[int, taking(int, lambda slots: True, "", partial(max, 0))] = 0

    def __post_init__(self) -> None:
        line = "".join(c if c.isprintable() else "?" for c in self.sentence[:SENTENCE_LENGTH])
        object.__setattr__(self, "sentence", line)

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, sparse=("slots",))

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        read = decode_record(cls, kv, ("kind", "sentence"))
        if not read.kind:
            raise RecordError(f"{kv.key}: 'kind' is empty, expected {KINDS[1:]}")
        return read
