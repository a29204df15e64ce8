# SPDX-License-Identifier: Apache-2.0
"""The newest that any of this sidecar's clients was told: none is told anything older after it."""

from __future__ import annotations

from collections.abc import Callable

from launcher_shim.c10d.values.cell import Cell
from rdzv.mirror import Mirror


class Floor:
    """A revision of the store that only rises (docs/decisions/0018-consistency.md).

    ``on_ahead`` is called when it rises above what the mirror shows: not all that is known may be
    told then.
    """

    def __init__(self, mirror: Mirror, on_ahead: Callable[[], None]) -> None:
        self._mirror = mirror
        self._on_ahead = on_ahead
        self._revision = 0

    @property
    def reached(self) -> bool:
        """Whether the mirror shows all that anybody was told, so that all of it may be told."""
        return self._mirror.revision >= self._revision

    def begin_anew(self) -> None:
        """The store was restored or emptied: its revisions start anew."""
        self._revision = 0

    def allows(self, revision: int) -> bool:
        """Whether what has been so since ``revision`` may be told; then it has been told."""
        if revision > self._revision:
            self.raise_to(revision)
            return True
        return revision == self._revision or self._mirror.revision >= self._revision

    def raise_to(self, revision: int) -> None:
        """Take note that a client is told something of ``revision``: nothing older from now on."""
        if revision > self._revision:
            self._revision = revision
            if self._mirror.revision < revision:
                self._on_ahead()

    def raise_to_read(self, cell: Cell, revision: int) -> None:
        """Take note that a client is told what ``cell`` was in the store at ``revision``."""
        self.raise_to(cell.newest_of_queue())
        if cell.value() is not None:
            self.raise_to(cell.value_revision())
            return
        # Since when it has been absent is known where it was seen to go, or never was there.
        self.raise_to(cell.newest_revision())
        if self._mirror.revision < self._revision:
            self.raise_to(revision)
