# SPDX-License-Identifier: Apache-2.0
"""The record of what one pod's ranks have saved in their round, whether or not a drain asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import dump_record, load_record, take, take_unix_s
from rdzv.store import KeyValue

STEPS_MAX = 8
"""Steps that one record names; a rank names no more than four."""


@dataclass(frozen=True, slots=True)
class PodSaves:
    """What the ranks of one pod have saved in one round.

    ``steps``: those that all of its ranks have saved, the newest first, and not each of them.
    ``newest``: the newest step that any of them has saved, None before the first. ``step``: the
    boundary that the furthest of them had come to at ``at_unix_s``, by the pod's wall clock, which
    is for people.
    """

    member: str
    pod_uid: str
    run: str
    round: int
    steps: tuple[int, ...] = ()
    newest: int | None = None
    step: int = -1
    at_unix_s: float = 0.0
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode for the store."""
        return dump_record(
            {
                "pod_uid": self.pod_uid,
                "run": self.run,
                "round": self.round,
                "steps": self.steps,
                "newest": self.newest,
                "step": self.step,
                "at_unix_s": round(self.at_unix_s, 3),
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        newest = fields.get("newest")
        steps = take(kv.key, fields, "steps", list)
        if len(steps) > STEPS_MAX or not all(type(step) is int for step in steps):
            raise RecordError(f"{kv.key}: 'steps' is {steps!r}, expected up to {STEPS_MAX} steps")
        return cls(
            member=last_name(kv.key),
            pod_uid=take(kv.key, fields, "pod_uid", str),
            run=take(kv.key, fields, "run", str),
            round=take(kv.key, fields, "round", int),
            steps=tuple(steps),
            newest=None if newest is None else take(kv.key, fields, "newest", int),
            step=take(kv.key, fields, "step", int, -1),
            at_unix_s=take_unix_s(kv.key, fields, "at_unix_s"),
            mod_revision=kv.mod_revision,
        )
