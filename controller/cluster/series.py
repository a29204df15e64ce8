# SPDX-License-Identifier: Apache-2.0
"""Series: one Event that counts the repetitions of a reason at an object; pure.

An Event counts as told only once it is written: until then its series owes it, for any time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

REPEAT_S = 30.0
"""Minimum interval between two writes of a series. Shorter: a pod that flaps costs the API server
more. Longer: the count that kubectl shows is further behind."""
SILENCE_S = 600.0
"""Time after which a repetition is a new Event, as the former one is no news any more."""


@dataclass(frozen=True, slots=True)
class Series:
    """One reason at one object. Times are monotonic, in seconds.

    ``name``: the Event's name. ``count``: the number of repetitions; ``written``: how many of them
    the API server has. ``owed_revision``: the store's revision of the first that it lacks (inf: it
    has all).
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
        """Whether the API server lacks a part of the series."""
        return self.written < self.count

    @property
    def due_s(self) -> float:
        """The time of its next write: at once if none was written yet; inf if nothing is owed."""
        return self.written_s + REPEAT_S if self.owes else math.inf


def said(now: float, before: Series | None, name: str, message: str, revision: int) -> Series:
    """Add ``message`` at ``revision`` to the series; ``name`` is used if it starts a new Event."""
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
    """Return the series after a write of ``as_written``, its state when that write began."""
    owes = series.count > as_written.count
    return replace(
        series,
        written=as_written.count,
        written_s=now,
        owed_revision=as_written.revision + 1 if owes else math.inf,
    )


def told_up_to(revision: int, all_series: list[Series]) -> int:
    """Return the revision up to which everything is written, at most ``revision``."""
    owed = min((one.owed_revision for one in all_series), default=math.inf)
    return int(min(revision, owed - 1))
