# SPDX-License-Identifier: Apache-2.0
"""The part of a pod's settings that its whole job goes by."""

from __future__ import annotations

from rdzv.dataclass import dataclass
from rdzv.records.sizes import Sizes


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
