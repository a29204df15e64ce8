# SPDX-License-Identifier: Apache-2.0
"""The records of what client connections did last, which make every write happen once.

A connection has one, of its last operation, and one more for each that is done aside, while later
ones go on (``Stamp.aside``): that one stays until the connection closes. A record is written in
the same transaction as what it records, and that transaction compares the record's own revision.
So an operation whose outcome is unknown may simply be sent again: if it was
applied, or is still on its way and arrives first, the compare fails and the record tells so; if it
arrives later, its own compare fails.

The records hang on no lease: one that is gone when a cut ends could no longer tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from rdzv.keys import RunKeys, last_name
from rdzv.store import Compare, Delete, KeyValue, Put, Range


class Stamp(NamedTuple):
    """Whose request it is, and which one: ``author`` is the client's connection.

    ``again``: it may have been carried out before, by a sidecar before this one. ``lasting``: its
    author may have made requests of that one.
    """

    author: str
    number: int
    again: bool = False
    lasting: bool = False

    def aside(self) -> Stamp:
        """The stamp of what is done while later requests of the same client go on."""
        return self._replace(author=f"{self.author}:{self.number}")


class Ledger:
    """The records of this sidecar's clients, in one run."""

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys
        self._revisions: dict[str, int] = {}

    def knows(self, stamp: Stamp) -> bool:
        """Whether the author's record is known; else it must be read before it is written."""
        return not stamp.lasting or stamp.author in self._revisions

    def guard(self, stamp: Stamp) -> Compare:
        """Hold while nothing has been recorded since."""
        revision = self._revisions.get(stamp.author, 0)
        return Compare(self._keys.operation(stamp.author), "mod", "=", revision)

    def entry(self, stamp: Stamp, note: bytes) -> Put:
        """Record an operation, with what only its transaction knows."""
        return Put(self._keys.operation(stamp.author), b"%d %s" % (stamp.number, note))

    def look(self, stamp: Stamp) -> Range:
        """Read the author's record; ``take_entry`` takes the answer."""
        return Range(self._keys.operation(stamp.author))

    def recorded(self, stamp: Stamp, revision: int) -> None:
        """Take note that ``entry`` was written."""
        self._revisions[stamp.author] = revision

    def take_entry(self, stamp: Stamp, kvs: Iterable[KeyValue]) -> tuple[bytes, int] | None:
        """Take a record in: the note and the revision of this very operation, or None."""
        self._revisions[stamp.author] = 0
        for kv in kvs:
            self._revisions[stamp.author] = kv.mod_revision
            number, _, note = kv.value.partition(b" ")
            if number == b"%d" % stamp.number:
                return note, kv.mod_revision
        return None

    def forget(self, author: str) -> list[Delete]:
        """What drops all records of a connection that is closed for good."""
        for name in [name for name in self._revisions if name.partition(":")[0] == author]:
            del self._revisions[name]
        return [
            Delete(self._keys.operation(author)),
            Delete(self._keys.operation(f"{author}:"), prefix=True),
        ]


def left_behind(member: str, operations: Iterable[str]) -> list[str]:
    """Which records are of connections that have ended with a former sidecar of ``member``.

    Those of clients behind a relay are not: they go on.
    """
    direct = re.compile(rf"{re.escape(member)}\.[0-9a-f]{{12}}\.\d+(:\d+)?")
    return [key for key in operations if direct.fullmatch(last_name(key))]
