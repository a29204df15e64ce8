# SPDX-License-Identifier: Apache-2.0
"""Holds a Lease of Kubernetes, and runs what only the leader does for as long as it is held."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from controller.cluster.api import ClusterApi, Object
from controller.leader import decision
from controller.leader.decision import (
    GIVE_UP_S,
    LEASE_S,
    RENEW_S,
    Sighting,
    after,
)
from rdzv.errors import ClusterError, ClusterRefused

log = logging.getLogger(__name__)

CONFLICT = 409
CALL_S = 3.0
"""For one look at the Lease and one write of it."""
TOLD = "muster.dev/told-revision"
"""Annotation of the Lease: up to which revision of the store everything has been told."""


class Leadership:
    """One replica's part in it. ``path`` is that of the Lease, which has to be there.

    ``told`` is kept in the Lease, so that the next leader goes on from it: None where nobody has
    told anything yet. ``progress`` is the work's: how far it has come.
    """

    def __init__(self, api: ClusterApi, path: str, me: str, clock: Callable[[], float]) -> None:
        self.told: int | None = None
        self.progress: Callable[[], int | None] = lambda: None
        self.leads = False
        self._api = api
        self._path = path
        self._me = me
        self._clock = clock
        self._seen: Sighting | None = None
        self._renewed_s = 0.0

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` while this replica leads, until cancelled; then another may at once."""
        working: asyncio.Task[None] | None = None
        try:
            while True:
                await self._step()
                if self.leads and working is None:
                    working = asyncio.create_task(_awaited(work), name="lead")
                elif not self.leads and working is not None:
                    await _ended(working)
                    working = None
                await _rest(working, min(RENEW_S, self._left_s()))
        finally:
            if working is not None:
                await _ended(working)
            if self.leads:
                await self._give_back()

    async def _step(self) -> None:
        """Look at the Lease, and write it if that is due."""
        now = self._clock()
        try:
            async with asyncio.timeout(min(CALL_S, self._left_s())):
                held = await self._api.get(self._path)
                spec = held.get("spec") or {}
                version = str((held.get("metadata") or {}).get("resourceVersion", ""))
                holder = str(spec.get("holderIdentity") or "")
                self._seen = after(self._seen, now, holder, version)
                step, why = decision.decide(now, self._me, self._seen)
                if step == "wait":
                    self._stop(why)
                    return
                if not self.leads:
                    self.told, self.progress = _told_in(held), lambda: None
                await self._api.replace(self._path, self._held_by_me(held))
        except ClusterRefused as error:
            if error.status == CONFLICT:
                return  # another was the first, or the next look shows that it was we
            self._note(error)
        except (ClusterError, TimeoutError) as error:
            self._note(error)
        else:
            self._renewed_s = now
            if not self.leads:
                self.leads = True
                log.info("this replica is the leader: %s", why, extra={"event": "leader"})
        if self._left_s() == 0:
            self._stop("the Lease could not be renewed")

    def _left_s(self) -> float:
        """For how long it may lead without another renewal."""
        if not self.leads:
            return math.inf
        return max(0.0, self._renewed_s + GIVE_UP_S - self._clock())

    def _held_by_me(self, held: Object) -> Object:
        spec: dict[str, Any] = dict(held.get("spec") or {})
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        if spec.get("holderIdentity") != self._me:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec |= {
            "holderIdentity": self._me,
            "leaseDurationSeconds": round(LEASE_S),
            "renewTime": now,
        }
        metadata = dict(held.get("metadata") or {})
        if (told := self.progress()) is not None:
            self.told = told
        if self.told is not None:
            notes = dict(metadata.get("annotations") or {})
            metadata["annotations"] = {**notes, TOLD: str(self.told)}
        return {**held, "metadata": metadata, "spec": spec}

    async def _give_back(self) -> None:
        """Let another lead at once; where that fails, it waits until the Lease has run out."""
        self._stop("this replica is stopped")
        try:
            async with asyncio.timeout(CALL_S):
                held = self._held_by_me(await self._api.get(self._path))
                held["spec"]["holderIdentity"] = ""
                await self._api.replace(self._path, held)
        except (ClusterError, TimeoutError) as error:
            self._note(error)

    def _stop(self, why: str) -> None:
        if self.leads:
            self.leads = False
            log.info("this replica is no longer the leader: %s", why, extra={"event": "leader"})

    def _note(self, error: Exception) -> None:
        why = str(error) or f"it took longer than {CALL_S:g} s"
        log.warning(
            "cannot read or write the Lease of the leader election: %s",
            why,
            extra={"event": "leader_unknown"},
        )


def _told_in(held: Object) -> int | None:
    text = ((held.get("metadata") or {}).get("annotations") or {}).get(TOLD, "")
    return int(text) if str(text).isdecimal() else None


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()


async def _ended(working: asyncio.Task[None]) -> None:
    working.cancel()
    await asyncio.wait((working,))


async def _rest(working: asyncio.Task[None] | None, rest_s: float) -> None:
    """Wait for the next look; what the work fails with is a defect, and ends the process."""
    if working is None:
        await asyncio.sleep(rest_s)
        return
    await asyncio.wait((working,), timeout=rest_s)
    if working.done():
        working.result()
