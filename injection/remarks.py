# SPDX-License-Identifier: Apache-2.0
"""The remarks of an injection on a manifest, and their levels."""

from __future__ import annotations

from typing import Literal

Level = Literal["note", "warning", "error"]


class Remark(str):
    """One sentence and its level.

    A note is worth knowing; a warning is about something that its user may not expect; with an
    error the manifest cannot do what it is for.
    """

    level: Level

    def __new__(cls, sentence: str, level: Level = "note") -> Remark:
        """Create a remark."""
        remark = super().__new__(cls, sentence)
        remark.level = level
        return remark

    def about(self, label: str) -> Remark:
        """Return the remark with the label of its object before it."""
        return Remark(f"{label}: {self}", self.level)

    def lowered(self) -> Remark:
        """Return the remark, an error as a warning, for a user who goes on in spite of it."""
        return Remark(self, "warning") if self.level == "error" else self


def warning(sentence: str) -> Remark:
    """Create a warning."""
    return Remark(sentence, "warning")
