# SPDX-License-Identifier: Apache-2.0
"""The newest that any of this sidecar's clients was told: none is told anything older after it."""

from __future__ import annotations

from launcher_shim.c10d.cell import Cell
from rdzv.watching import Mirror


class Floor:
    """A revision of the store that only rises (docs/decisions/0018-consistency.md)."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._revision = 0

    def begin_anew(self) -> None:
        """The store was restored or emptied: its revisions start anew."""
        self._revision = 0

    def may_tell(self, revision: int) -> bool:
        """Whether what has been so since ``revision`` may be told; then it has been told."""
        if revision > self._revision:
            self._revision = revision
            return True
        return revision == self._revision or self._mirror.revision >= self._revision

    def tell(self, revision: int) -> None:
        """Take note that a client is told something of ``revision``: nothing older from now on."""
        self._revision = max(self._revision, revision)

    def tell_read(self, cell: Cell, revision: int) -> None:
        """Take note that a client is told what ``cell`` was in the store at ``revision``."""
        if cell.value() is not None:
            self.tell(cell.value_revision())
            return
        # Since when it has been absent is known where it was seen to go, or never was there.
        self.tell(cell.newest_revision())
        if self._mirror.revision < self._revision:
            self.tell(revision)
