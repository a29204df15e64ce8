# SPDX-License-Identifier: Apache-2.0
"""What is said again and again of one object is one Event that counts; pure.

An Event is told only once it is written: until then its series owes it, however long that takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

REPEAT_S = 30.0
"""Between two writes of one series. Shorter: a pod that flaps costs the API server more. Longer:
the count that kubectl shows is further behind."""
SILENCE_S = 600.0
"""After so long, what is said again is a new Event: the former one is no news any more."""


@dataclass(frozen=True, slots=True)
class Series:
    """One reason at one object. Times are monotonic, in seconds.

    ``count`` is how often it was said, ``written`` how much of that the API server has;
    ``owed_revision`` is the store's revision of the first that it has not (inf: it has all).
    ``name``: of the Event.
    """

    name: str
    message: str
    revision: int
    count: int = 1
    written: int = 0
    said_s: float = 0.0
    written_s: float = -math.inf
    owed_revision: float = math.inf

    @property
    def owes(self) -> bool:
        """Whether the API server does not have all of it."""
        return self.written < self.count

    @property
    def due_s(self) -> float:
        """When it is to be written: what is said first, at once."""
        return self.written_s + REPEAT_S if self.owes else math.inf


def said(now: float, before: Series | None, name: str, message: str, revision: int) -> Series:
    """Take in that ``message`` is said once more at ``revision``; ``name``: were it a new Event."""
    if before is None or (not before.owes and now - before.said_s > SILENCE_S):
        return Series(name, message, revision, said_s=now, owed_revision=revision)
    if revision <= before.revision and message == before.message:
        return before
    return replace(
        before,
        message=message,
        revision=max(revision, before.revision),
        count=before.count + 1,
        said_s=now,
        owed_revision=min(before.owed_revision, revision),
    )


def after_write(now: float, series: Series, as_written: Series) -> Series:
    """Take in that the API server has the series as it was when that write began."""
    owes = series.count > as_written.count
    return replace(
        series,
        written=as_written.count,
        written_s=now,
        owed_revision=as_written.revision + 1 if owes else math.inf,
    )


def told_up_to(revision: int, all_series: list[Series]) -> int:
    """Up to which revision everything is told, of all that was taken in up to ``revision``."""
    owed = min((one.owed_revision for one in all_series), default=math.inf)
    return int(min(revision, owed - 1))
