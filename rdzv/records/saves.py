# SPDX-License-Identifier: Apache-2.0
"""The record of what one pod's ranks have saved in their round, whether or not a drain asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import (
    dump_record,
    load_record,
    take,
    take_cursor,
    take_samples,
    take_seconds,
    take_tag,
    take_unix_s,
)
from rdzv.records.still import StillRank, take_still
from rdzv.store import KeyValue

ROOM = 1.25
"""The grace to advise, beside the longest save."""

HOROVODRUN = ""
"""The run of ranks that a horovodrun starts: they report their numbers and the step alone."""

STEPS_MAX = 8
"""Bound on the steps that one record names; a rank names no more than four."""


@dataclass(frozen=True, slots=True)
class PodSaves:
    """The saves of one pod's ranks in one round.

    ``steps``: those that all of its ranks have saved, the newest first, and not every one of them.
    ``newest``: the newest step that any of them has saved, None before the first. ``step``: the
    boundary that the furthest of them had come to at ``at_unix_s``, by the pod's wall clock, which
    is for people. ``cursors``: the data cursor of each of ``steps``, empty for none; there are no
    cursors at all if the ranks give none. ``ranks`` are the numbers of its ranks. ``tag``: the save
    tag of the paths that they saved to, empty if they have asked for none. ``save_s``: seconds that
    the slowest of their newest saves has taken, if that is longer than its pod has in a drain:
    ``grace_s`` less ``reserve_s``; all three are 0.0 if it is not.
    ``samples``: what its ranks say of the samples of ``steps``, empty for nothing.
    ``waits``: the share of its time in which each of ``ranks`` waits for others; none if one is
    unknown.
    ``still``: what each of its ranks does, if they make no step; ``still_since_unix_s``: their last
    report.
    """

    member: str
    pod_uid: str
    run: str
    round: int
    steps: tuple[int, ...] = ()
    newest: int | None = None
    step: int = -1
    at_unix_s: float = 0.0
    cursors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    tag: str = ""
    save_s: float = 0.0
    grace_s: float = 0.0
    reserve_s: float = 0.0
    samples: str = ""
    waits: tuple[float, ...] = ()
    still: tuple[StillRank, ...] = ()
    still_since_unix_s: float = 0.0
    mod_revision: int = 0

    @property
    def too_slow(self) -> str:
        """One sentence on a save that takes longer than a drain has; empty if none does."""
        if not self.save_s:
            return ""
        enough_s = 10 * math.ceil((self.save_s * ROOM + self.reserve_s) / 10)
        return (
            f"saves take {self.save_s:.0f} s, and {self.member} has"
            f" {self.grace_s - self.reserve_s:g} s in a drain (grace {self.grace_s:g} s -"
            f" {self.reserve_s:g} s reserve): drains will expire and lose steps; set"
            f" terminationGracePeriodSeconds and MUSTER_GRACE_S to {enough_s} or more"
        )

    def cursor_of(self, step: int) -> str:
        """Return the data cursor that its ranks gave with the save of ``step``; empty for none."""
        return dict(zip(self.steps, self.cursors, strict=False)).get(step, "")

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return dump_record(
            {
                "pod_uid": self.pod_uid,
                "run": self.run,
                "round": self.round,
                "steps": self.steps,
                "newest": self.newest,
                "step": self.step,
                "at_unix_s": round(self.at_unix_s, 3),
                "cursors": self.cursors,
                "ranks": self.ranks,
                "tag": self.tag,
                **(
                    {
                        "save_s": round(self.save_s, 1),
                        "grace_s": self.grace_s,
                        "reserve_s": self.reserve_s,
                    }
                    if self.save_s
                    else {}
                ),
                "samples": self.samples,
                **({"waits": [round(one, 2) for one in self.waits]} if self.waits else {}),
                **(
                    {
                        "still": [one.as_json() for one in self.still],
                        "still_since_unix_s": round(self.still_since_unix_s, 3),
                    }
                    if self.still
                    else {}
                ),
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        newest = fields.get("newest")
        steps = take(kv.key, fields, "steps", list)
        if len(steps) > STEPS_MAX or not all(type(step) is int for step in steps):
            raise RecordError(f"{kv.key}: 'steps' is {steps!r}, expected up to {STEPS_MAX} steps")
        cursors = take(kv.key, fields, "cursors", list, [])
        ranks = take(kv.key, fields, "ranks", list, [])
        waits = take(kv.key, fields, "waits", list, [])
        if not all(type(one) in (int, float) and 0 <= one <= 1 for one in waits):
            raise RecordError(f"{kv.key}: 'waits' is {waits!r}, expected shares of 1")
        if len(cursors) not in (0, len(steps)) or not all(type(rank) is int for rank in ranks):
            raise RecordError(f"{kv.key}: expected a cursor for each step, and numbers of ranks")
        return cls(
            member=last_name(kv.key),
            pod_uid=take(kv.key, fields, "pod_uid", str),
            run=take(kv.key, fields, "run", str),
            round=take(kv.key, fields, "round", int),
            steps=tuple(steps),
            newest=None if newest is None else take(kv.key, fields, "newest", int),
            step=take(kv.key, fields, "step", int, -1),
            at_unix_s=take_unix_s(kv.key, fields, "at_unix_s"),
            cursors=tuple(take_cursor(kv.key, {"cursor": one}) for one in cursors),
            ranks=tuple(ranks),
            tag=take_tag(kv.key, fields),
            save_s=_seconds(kv.key, fields, "save_s"),
            grace_s=_seconds(kv.key, fields, "grace_s"),
            reserve_s=_seconds(kv.key, fields, "reserve_s"),
            samples=take_samples(kv.key, fields),
            waits=tuple(map(float, waits)) if len(waits) == len(ranks) else (),
            still=take_still(kv.key, fields),
            still_since_unix_s=(
                take_unix_s(kv.key, fields, "still_since_unix_s") if "still" in fields else 0.0
            ),
            mod_revision=kv.mod_revision,
        )


def _seconds(key: str, fields: Mapping[str, Any], name: str) -> float:
    return take_seconds(key, fields, name) if name in fields else 0.0
