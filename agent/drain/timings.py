# SPDX-License-Identifier: Apache-2.0
"""The duration of each phase of a drain, as one sidecar saw it: for the history."""

from __future__ import annotations

from collections.abc import Mapping

from rdzv.drain.phases import phase_of
from rdzv.snapshot import Snapshot


class Chronicle:
    """The times at which each drain was first seen in each phase: monotonic, in seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}

    def see(self, now: float, snapshot: Snapshot) -> None:
        """Record the phases in one snapshot; forget drains that are no longer stored."""
        for pod_uid in self._seen.keys() - snapshot.drains.keys():
            del self._seen[pod_uid]
        for pod_uid, drain in snapshot.drains.items():
            self._seen.setdefault(pod_uid, {}).setdefault(phase_of(snapshot, drain).name, now)

    def phases_s(self, now: float, pod_uid: str) -> Mapping[str, float]:
        """Return the seconds from a drain's first sight to each phase, and to ``now``, its end."""
        seen = self._seen.get(pod_uid, {})
        if not seen:
            return {}
        began = min(seen.values())
        phases = {
            f"{name}_after_s": round(at - began, 3) for name, at in seen.items() if at > began
        }
        return {**phases, "took_s": round(now - began, 3)}
