# SPDX-License-Identifier: Apache-2.0
"""The part of a pod's settings that its whole job goes by, with the numbers of nodes of a world."""

from __future__ import annotations

from rdzv.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a world may have, in nodes: a choice of those from ``least`` to ``most``.

    ``allowed`` names the choice; if it is empty, the multiples of ``unit`` are allowed. A job that
    has no size at all within its bounds never trains; ``fault`` says so.
    """

    least: int
    most: int
    allowed: tuple[int, ...] = ()
    unit: int = 1

    def largest(self, nodes: int) -> int:
        """Return the largest size that ``nodes`` nodes are enough for; 0 if there is none."""
        room = min(nodes, self.most)
        if self.allowed:
            return max((size for size in self.allowed if self.least <= size <= room), default=0)
        size = room - room % self.unit
        return size if size >= self.least else 0

    @property
    def smallest(self) -> int:
        """The smallest size that is allowed; ``least`` if there is none."""
        if self.allowed:
            return min((size for size in self.allowed if size >= self.least), default=self.least)
        return -(-self.least // self.unit) * self.unit

    @property
    def full(self) -> int:
        """The largest size that is allowed; 0 if there is none."""
        return self.largest(self.most)

    @property
    def fault(self) -> str:
        """The reason why no world could form; empty if one can."""
        if self.least > self.most:
            return (
                f"min is {self.least}, more than max, which is {self.most}: raise max or lower min"
            )
        if self.full:
            return ""
        of = f"none of the sizes {', '.join(map(str, self.allowed))}"
        if not self.allowed:
            of = f"no multiple of {self.unit}"
        return f"{of} lies between min {self.least} and max {self.most}: no world could form"

    def __str__(self) -> str:
        text = f"min {self.least} and max {self.most}"
        if self.allowed:
            return f"{text}, in sizes {', '.join(map(str, self.allowed))}"
        return text if self.unit == 1 else f"{text}, in multiples of {self.unit}"


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """The bounds, sizes and gather window that one pod was started with.

    The fields are as in ``Job``. As text, which is how records keep it, equal templates are always
    spelled alike, and defaults are left out.
    """

    min_workers: int
    max_workers: int
    allowed_sizes: tuple[int, ...] = ()
    unit: int = 1
    gather_s: float = 0.0

    @property
    def sizes(self) -> Sizes:
        """The sizes that worlds of its job may have."""
        return Sizes(self.min_workers, self.max_workers, self.allowed_sizes, self.unit)

    def __str__(self) -> str:
        text = f"min={self.min_workers} max={self.max_workers}"
        if self.allowed_sizes:
            text += f" sizes={','.join(map(str, self.allowed_sizes))}"
        if self.unit != 1:
            text += f" unit={self.unit}"
        return f"{text} gather={self.gather_s:g}s" if self.gather_s else text
