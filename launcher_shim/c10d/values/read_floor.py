# SPDX-License-Identifier: Apache-2.0
"""Monotonic reads: no answer to a client of this sidecar is older than one given before."""

from __future__ import annotations

from collections.abc import Callable

from launcher_shim.c10d.values.cell import Cell
from rdzv.mirror import Mirror


class Floor:
    """The newest revision that an answer has shown (docs/decisions/endpoint.md).

    ``on_ahead`` is called when it rises above the mirror's: older cached values must not be
    answered then.
    """

    def __init__(self, mirror: Mirror, on_ahead: Callable[[], None]) -> None:
        self._mirror = mirror
        self._on_ahead = on_ahead
        self._revision = 0

    @property
    def reached(self) -> bool:
        """Whether the mirror has reached the floor, so that every cached value may be answered."""
        return self._mirror.revision >= self._revision

    def begin_anew(self) -> None:
        """Begin at 0: the store was restored or emptied, and its revisions start anew."""
        self._revision = 0

    def allows(self, revision: int) -> bool:
        """Return whether a value valid since ``revision`` may be answered; raise the floor then."""
        if revision > self._revision:
            self.raise_to(revision)
            return True
        return revision == self._revision or self._mirror.revision >= self._revision

    def raise_to(self, revision: int) -> None:
        """Raise the floor to the revision of an answer."""
        if revision > self._revision:
            self._revision = revision
            if self._mirror.revision < revision:
                self._on_ahead()

    def raise_to_read(self, cell: Cell, revision: int) -> None:
        """Raise the floor for the answer that ``cell`` was read at ``revision``."""
        self.raise_to(cell.newest_of_queue())
        if cell.value() is not None:
            self.raise_to(cell.value_revision())
            return
        # The start of its absence is known if its deletion was seen, or it never existed.
        self.raise_to(cell.newest_revision())
        if self._mirror.revision < self._revision:
            self.raise_to(revision)
