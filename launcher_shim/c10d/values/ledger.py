# SPDX-License-Identifier: Apache-2.0
"""The ledger of client connections: it makes every write idempotent, so that a retry is safe.

A connection has one entry, for its last operation, and one more for each operation that runs aside
of later ones (``Stamp.aside``), kept until the connection closes. An entry is written in the same
transaction as its operation, and that transaction compares the entry's own revision. So an
operation whose outcome is unknown is simply sent again: if the first attempt was applied or arrives
before, the compare fails and the entry shows it; if it arrives later, its own compare fails.

The entries have no lease: they must still be there when a cut ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from rdzv.keys import RunKeys, last_name
from rdzv.store import Compare, Delete, KeyValue, Put, Range


class Stamp(NamedTuple):
    """Identity of one request."""

    author: str
    """Name of the client's connection."""
    number: int
    """Number of the request on it."""
    again: bool = False
    """Whether an earlier sidecar may have carried it out already."""
    lasting: bool = False
    """Whether its author may have made requests of an earlier sidecar."""

    def aside(self) -> Stamp:
        """Return the stamp of an operation that runs aside of the same client's later requests."""
        return self._replace(author=f"{self.author}:{self.number}")


class Ledger:
    """The ledger of this sidecar's clients, in one run."""

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys
        self._revisions: dict[str, int] = {}

    def knows(self, stamp: Stamp) -> bool:
        """Return whether the author's entry is known; if not, read it before a write."""
        return not stamp.lasting or stamp.author in self._revisions

    def guard(self, stamp: Stamp) -> Compare:
        """Return the compare that holds while the author's entry is the known one."""
        revision = self._revisions.get(stamp.author, 0)
        return Compare(self._keys.operation(stamp.author), "mod", "=", revision)

    def entry(self, stamp: Stamp, note: bytes) -> Put:
        """Return the write of an entry; ``note`` is kept for the answer to a retry."""
        return Put(self._keys.operation(stamp.author), b"%d %s" % (stamp.number, note))

    def look(self, stamp: Stamp) -> Range:
        """Return the read of the author's entry; ``take_entry`` takes the answer."""
        return Range(self._keys.operation(stamp.author))

    def recorded(self, stamp: Stamp, revision: int) -> None:
        """Note that ``entry`` was written at ``revision``."""
        self._revisions[stamp.author] = revision

    def take_entry(self, stamp: Stamp, kvs: Iterable[KeyValue]) -> tuple[bytes, int] | None:
        """Note a read entry; return its note and revision if it is of this very operation."""
        self._revisions[stamp.author] = 0
        for kv in kvs:
            self._revisions[stamp.author] = kv.mod_revision
            number, _, note = kv.value.partition(b" ")
            if number == b"%d" % stamp.number:
                return note, kv.mod_revision
        return None

    def forget(self, author: str) -> list[Delete]:
        """Return the deletion of all entries of a connection that is closed for good."""
        for name in [name for name in self._revisions if name.partition(":")[0] == author]:
            del self._revisions[name]
        return [
            Delete(self._keys.operation(author)),
            Delete(self._keys.operation(f"{author}:"), prefix=True),
        ]


def left_behind(member: str, operations: Iterable[str]) -> list[str]:
    """Return entries of connections that ended with a former sidecar of ``member``.

    Connections behind a relay are left out: they go on.
    """
    direct = re.compile(rf"{re.escape(member)}\.[0-9a-f]{{12}}\.\d+(:\d+)?")
    return [key for key in operations if direct.fullmatch(last_name(key))]
