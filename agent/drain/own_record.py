# SPDX-License-Identifier: Apache-2.0
"""The record of this pod's own drain, kept for a sidecar that starts again: pure.

Notices come in any order and number, and make one drain: the earliest deadline counts.
"""

from __future__ import annotations

import math
from dataclasses import replace

from agent.drain.notice import Notice
from launcher_shim.pod.hold import reserve_s
from launcher_shim.rundir import layout
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import Seconds, decode, encode, load_record
from rdzv.records.drain import CONTROLLER, ENDING_SOURCES, SIGNS, Drain, Outcome

SAME_DEADLINE_S = 1.0
"""Tolerance between equal deadlines, in seconds: a repeated notice differs by its own delay."""

OUTLIVED_S = 5.0
"""Time past its deadline after which a pod that lives on was not being ended after all, in
seconds."""


@dataclass(frozen=True, slots=True)
class OwnDrainRecord:
    """The notes on this pod's drain. Times are of the boot clock, None if there is none.

    ``sources`` are those of all notices. ``generation`` is the one in whose store keys the drain
    was last seen, 0 for none, and ``revision`` that of its record then. ``outcome`` and ``step``
    are those that it had, so that a store that has lost them does not decide once more.
    """

    pod_uid: str
    sources: tuple[str, ...]
    reason: str
    deadline_boot_s: Seconds | None
    reserve_s: Seconds
    generation: int = 0
    revision: int = 0
    outcome: Outcome = ""
    step: int | None = None

    @classmethod
    def of_notice(
        cls, pod_uid: str, notice: Notice, now_boot_s: float, grace_s: float
    ) -> OwnDrainRecord:
        """Build the notes of a first notice; ``grace_s`` is the pod's, for one without a time."""
        left_s = grace_s if notice.seconds_left is None else notice.seconds_left
        return cls(pod_uid, (notice.source,), notice.reason, now_boot_s + left_s, reserve_s(left_s))

    @classmethod
    def of_drain(cls, drain: Drain, now_boot_s: float) -> OwnDrainRecord:
        """Build the notes of a drain that another process stored: its time counts from now on."""
        left_s = drain.seconds_left
        deadline_s = None if left_s is None else now_boot_s + left_s
        return cls(drain.pod_uid, (drain.source,), drain.reason, deadline_s, drain.reserve_s)

    def joined(self, other: OwnDrainRecord) -> OwnDrainRecord:
        """Return these notes with the sources of ``other``, and its deadline if it is earlier.

        Those are of another notice, or of a drain just stored by another process, which may leave
        it less time, or make it an order.
        """
        both = replace(self, sources=tuple(dict.fromkeys((*self.sources, *other.sources))))
        ours_s = math.inf if self.deadline_boot_s is None else self.deadline_boot_s
        if other.deadline_boot_s is None or other.deadline_boot_s > ours_s - SAME_DEADLINE_S:
            return both
        return replace(both, deadline_boot_s=other.deadline_boot_s, reserve_s=other.reserve_s)

    @property
    def ending(self) -> bool:
        """Whether a hook or signal of the pod itself gave notice."""
        return not ENDING_SOURCES.isdisjoint(self.sources)

    @property
    def other_source(self) -> str:
        """The first source but the controller, which withdraws its own requests alone; or empty."""
        return next((source for source in self.sources if source != CONTROLLER), "")

    @property
    def outlived_boot_s(self) -> float | None:
        """The moment after which a pod that still lives was not being ended; None for none.

        There is none for an order. The end of a pod runs the preStop hook of the sidecar, and stops
        the training container: both notices together are no mistake.
        """
        certain = "prestop" in self.sources and not {"sigterm", "hold"}.isdisjoint(self.sources)
        if self.deadline_boot_s is None or certain or not SIGNS.issuperset(self.sources):
            return None
        return self.deadline_boot_s + OUTLIVED_S

    def after_cancellation(self) -> OwnDrainRecord | None:
        """Return the notes without what was cancelled; None if the pod is not being ended.

        A drain of a pod that is being ended cannot be cancelled: such a notice came later.
        """
        left = tuple(source for source in self.sources if source in ENDING_SOURCES)
        return replace(self, sources=left, generation=0, outcome="", step=None) if left else None

    def record(self, member: str, now_boot_s: float) -> Drain:
        """Build the drain record as of ``now_boot_s``."""
        left_s = self.deadline_boot_s
        return Drain(
            pod_uid=self.pod_uid,
            member=member,
            reason=self.reason,
            source=self.sources[0],
            seconds_left=None if left_s is None else max(0.0, left_s - now_boot_s),
            reserve_s=self.reserve_s,
            requested_by=member,
            ending=self.ending,
            outcome=self.outcome,
            step=self.step,
        )

    def to_json(self) -> bytes:
        """Encode the notes for the run directory."""
        return encode(self)

    @classmethod
    def from_json(cls, content: bytes) -> OwnDrainRecord:
        """Decode the notes; raise ``RecordError`` if they are malformed."""
        fields = load_record(layout.DRAIN, content)
        notes = decode(cls, layout.DRAIN, fields, ("generation", "revision"))
        if not notes.sources:
            raise RecordError(f"{layout.DRAIN}: 'sources' is empty, expected who gave notice")
        return notes
