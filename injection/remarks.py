# SPDX-License-Identifier: Apache-2.0
"""What injection says beside the manifest, and how much it weighs."""

from __future__ import annotations

from typing import Literal

Level = Literal["note", "warning", "error"]


class Remark(str):
    """A sentence. A note is worth knowing; a warning is not what its user may expect; with an
    error the manifest cannot do what it is for.
    """

    level: Level

    def __new__(cls, sentence: str, level: Level = "note") -> Remark:
        """Make one."""
        remark = super().__new__(cls, sentence)
        remark.level = level
        return remark

    def about(self, label: str) -> Remark:
        """The same with the object that it is about before it."""
        return Remark(f"{label}: {self}", self.level)

    def lowered(self) -> Remark:
        """The same for somebody who goes on in spite of an error."""
        return Remark(self, "warning") if self.level == "error" else self


def warning(sentence: str) -> Remark:
    """Make a warning."""
    return Remark(sentence, "warning")
