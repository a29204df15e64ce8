# SPDX-License-Identifier: Apache-2.0
"""The record of this pod's own drain, kept for a sidecar that starts again: pure.

Notices come in any order and number, and make one drain: the earliest deadline counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agent.drain.notice import Notice
from launcher_shim.pod.grace import reserve_s
from launcher_shim.rundir import layout
from rdzv.errors import RecordError
from rdzv.records.codec import dump_record, load_record, take, take_seconds
from rdzv.records.drain import CONTROLLER, ENDING_SOURCES, Drain

SAME_DEADLINE_S = 1.0
"""A notice that is repeated names the same deadline, give or take its way here."""

OUTLIVED_S = 5.0
"""A pod that lives on for this long past its deadline was not being ended after all."""


@dataclass(frozen=True, slots=True)
class OwnDrainRecord:
    """Times are of the boot clock, None where there is none.

    ``sources`` are those of all notices. ``generation`` is the one that the drain was last seen on
    record in, 0 for none, ``revision`` that of the record then.
    """

    pod_uid: str
    sources: tuple[str, ...]
    reason: str
    deadline_boot_s: float | None
    reserve_s: float
    generation: int = 0
    revision: int = 0

    @classmethod
    def of_notice(
        cls, pod_uid: str, notice: Notice, now_boot_s: float, grace_s: float
    ) -> OwnDrainRecord:
        """Begin with a notice; ``grace_s`` is the pod's, for one that does not know its time."""
        left_s = grace_s if notice.seconds_left is None else notice.seconds_left
        return cls(pod_uid, (notice.source,), notice.reason, now_boot_s + left_s, reserve_s(left_s))

    @classmethod
    def of_drain(cls, drain: Drain, now_boot_s: float) -> OwnDrainRecord:
        """Begin with what somebody else put on record: its time counts from when it is seen."""
        left_s = drain.seconds_left
        deadline_s = None if left_s is None else now_boot_s + left_s
        return cls(drain.pod_uid, (drain.source,), drain.reason, deadline_s, drain.reserve_s)

    def and_notice(self, notice: Notice, now_boot_s: float, grace_s: float) -> OwnDrainRecord:
        """Take another notice in."""
        other = OwnDrainRecord.of_notice(self.pod_uid, notice, now_boot_s, grace_s)
        both = replace(self, sources=tuple(dict.fromkeys((*self.sources, notice.source))))
        assert other.deadline_boot_s is not None
        deadline_s = math.inf if self.deadline_boot_s is None else self.deadline_boot_s
        if other.deadline_boot_s > deadline_s - SAME_DEADLINE_S:
            return both
        return replace(both, deadline_boot_s=other.deadline_boot_s, reserve_s=other.reserve_s)

    @property
    def due_boot_s(self) -> float | None:
        """When SIGTERM passes at the latest."""
        return None if self.deadline_boot_s is None else self.deadline_boot_s - self.reserve_s

    @property
    def ending(self) -> bool:
        """Whether a hook or signal of the pod itself gave notice."""
        return not ENDING_SOURCES.isdisjoint(self.sources)

    @property
    def other_source(self) -> str:
        """Who gave notice besides the controller, which takes back what it alone has asked for."""
        return next((source for source in self.sources if source != CONTROLLER), "")

    @property
    def outlived_boot_s(self) -> float | None:
        """From when on a pod that still lives was not being ended; None where it surely is.

        Of all sources the sidecar's own preStop hook alone also runs where no pod ends.
        """
        if self.deadline_boot_s is None or set(self.sources) != {"prestop"}:
            return None
        return self.deadline_boot_s + OUTLIVED_S

    def record(self, member: str, now_boot_s: float) -> Drain:
        """The drain as it goes on record at ``now_boot_s``."""
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
        )

    def to_json(self) -> bytes:
        """Encode for the run directory."""
        return dump_record(
            {
                "pod_uid": self.pod_uid,
                "sources": self.sources,
                "reason": self.reason,
                "deadline_boot_s": self.deadline_boot_s,
                "reserve_s": self.reserve_s,
                "generation": self.generation,
                "revision": self.revision,
            }
        )

    @classmethod
    def from_json(cls, content: bytes) -> OwnDrainRecord:
        """Decode; raises ``RecordError``."""
        fields = load_record(layout.DRAIN, content)
        sources = take(layout.DRAIN, fields, "sources", list)
        if not sources or not all(isinstance(source, str) for source in sources):
            raise RecordError(f"{layout.DRAIN}: 'sources' is {sources!r}, expected who gave notice")
        return cls(
            take(layout.DRAIN, fields, "pod_uid", str),
            tuple(sources),
            take(layout.DRAIN, fields, "reason", str),
            _moment(fields, "deadline_boot_s"),
            take_seconds(layout.DRAIN, fields, "reserve_s"),
            take(layout.DRAIN, fields, "generation", int),
            take(layout.DRAIN, fields, "revision", int),
        )


def _moment(fields: Mapping[str, Any], name: str) -> float | None:
    return None if fields.get(name) is None else take_seconds(layout.DRAIN, dict(fields), name)
