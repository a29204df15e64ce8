# SPDX-License-Identifier: Apache-2.0
"""What happened in one simulation, line by line, and a digest by which two of them compare."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

Line = tuple[float, str, str]


class Timeline:
    """Lines in the order of their happening. ``clock`` is the virtual time, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lines: list[Line] = []
        self._clock = clock

    def add(self, who: str, what: str) -> None:
        """Write one line."""
        self.lines.append((self._clock(), who, what))

    def digest(self) -> str:
        """The same for two simulations only if every line of them is the same."""
        text = "\n".join(f"{at_s!r} {who} {what}" for at_s, who, what in self.lines)
        return sha256(text.encode()).hexdigest()

    def text(self) -> str:
        """For people to read."""
        return "\n".join(f"{at_s:10.3f}  {who:<12} {what}" for at_s, who, what in self.lines)
