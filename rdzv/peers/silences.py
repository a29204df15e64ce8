# SPDX-License-Identifier: Apache-2.0
"""The members that others call silent now, and when each may be evicted, as one sidecar sees it."""

from __future__ import annotations

import math
from collections.abc import Collection

from rdzv.errors import RecordError
from rdzv.peers.decision import VETO_S
from rdzv.records.suspicion import Suspicion
from rdzv.store import WatchEvent


class SilentMembers:
    """Follows the suspicions in the store. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[str, float]] = {}

    def note(self, event: WatchEvent, now_s: float) -> None:
        """Take in a change of the store, of whatever key."""
        key = event.kv.key
        if "/suspicions/" not in key:
            return
        before = self._since_s.pop(key, None)
        if event.kind != "put":
            return
        try:
            one = Suspicion.from_kv(event.kv)
        except RecordError:
            return
        # One whose connection is refused is evicted once its world has failed: torch sees that.
        if one.sign == "silent":
            same = before is not None and before[0] == one.member
            self._since_s[key] = before if before and same else (one.member, now_s)

    def evicts_s(self, world: Collection[str]) -> float:
        """Return when the first of ``world`` may be evicted; infinite if none is called silent."""
        since = [at_s for member, at_s in self._since_s.values() if member in world]
        return min(since) + VETO_S if since else math.inf
