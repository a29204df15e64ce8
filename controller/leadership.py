# SPDX-License-Identifier: Apache-2.0
"""Leadership by a Kubernetes Lease: one replica makes the writes that must be made once.

The decision is a pure function of the time and of the observed Lease; clocks are not compared. The
holder renews the Lease periodically. A replica that has seen the same version of it for the
duration of the Lease takes it over, by a write that the API server refuses if another came first.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from controller.cluster.api import CONFLICT, ClusterApi, Object
from rdzv.errors import ClusterError, ClusterRefused
from rdzv.reconcile import Loop, Outlook

log = logging.getLogger(__name__)

LEASE_S = 15.0
"""Duration of the Lease without a renewal. Shorter: an API server that stalls changes the leader
needlessly. Longer: nobody writes for as long after the leader has died."""
RENEW_S = 3.0
"""Interval between two reads of the Lease, by the holder and by the others."""
GIVE_UP_S = 10.0
"""Time after its last renewal at which the holder stops: before another replica may begin."""

Step = Literal["renew", "take", "wait"]

CALL_S = 3.0
"""Timeout for one read and one write of the Lease."""
TOLD = "muster.dev/told-revision"
"""Annotation of the Lease: the store's revision up to which all Events are written."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The Lease at one version. ``seen_s``: the time of its first read, by this replica's clock."""

    holder: str
    version: str
    seen_s: float


def sighting_after(before: Sighting | None, now: float, holder: str, version: str) -> Sighting:
    """Return the sighting after a read at ``now``: ``before`` if the version is the same."""
    if before is not None and before.version == version:
        return before
    return Sighting(holder, version, now)


def next_step(now: float, me: str, seen: Sighting) -> tuple[Step, str]:
    """Decide the next step of ``me``; return it with its reason in one sentence."""
    if seen.holder == me:
        return "renew", "this replica is the leader"
    if not seen.holder:
        return "take", "there was no leader"
    if now - seen.seen_s >= LEASE_S:
        return "take", f"{seen.holder} has been silent for {LEASE_S:g} s"
    return "wait", f"{seen.holder} is the leader"


class Leadership(Loop):
    """One replica's candidacy. ``path`` is that of the Lease, which must exist.

    ``told`` is stored in the Lease, so that the next leader continues from it; None if no leader
    has published anything yet. The work sets ``progress``, which returns the new value of ``told``.
    """

    def __init__(self, api: ClusterApi, path: str, me: str, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.told: int | None = None
        self.progress: Callable[[], int | None] = lambda: None
        self.leads = False
        self._api = api
        self._path = path
        self._me = me
        self._seen: Sighting | None = None
        self._renewed_s = 0.0
        self._work: Callable[[], Awaitable[None]]
        self._working: asyncio.Task[None] | None = None

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` while this replica leads, until cancelled; then release the Lease."""
        self._work = work
        try:
            await super().run()
        finally:
            await self._end_work()
            if self.leads:
                await self._give_back()

    async def step(self) -> Outlook:
        """Keep the Lease; begin and end the work with it. An error of the work is raised."""
        if self._working is not None and self._working.done():
            self._working.result()
        await self._keep()
        if not self.leads:
            await self._end_work()
        elif self._working is None:
            self._working = asyncio.create_task(_awaited(self._work), name="lead")
            self._working.add_done_callback(lambda _: self.wake())
        return Outlook(look_at_s=self.clock() + min(RENEW_S, self._left_s()))

    async def _end_work(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait((self._working,))
            self._working = None

    async def _keep(self) -> None:
        """Read the Lease, and take or renew it if this replica may."""
        now = self.clock()
        try:
            async with asyncio.timeout(min(CALL_S, self._left_s())):
                held = await self._api.get(self._path)
                spec = held.get("spec") or {}
                version = str((held.get("metadata") or {}).get("resourceVersion", ""))
                holder = str(spec.get("holderIdentity") or "")
                self._seen = sighting_after(self._seen, now, holder, version)
                step, why = next_step(now, self._me, self._seen)
                if step == "wait":
                    self._stop(why)
                    return
                if not self.leads:
                    self.told, self.progress = _told_in(held), lambda: None
                await self._api.replace(self._path, self._held_by_me(held))
        except ClusterRefused as error:
            if error.status == CONFLICT:
                return  # another replica won, or the next read shows that this one holds it
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
        """Return the time for which this replica may lead without a renewal; inf if it does not."""
        if not self.leads:
            return math.inf
        return max(0.0, self._renewed_s + GIVE_UP_S - self.clock())

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
        """Release the Lease, so that another leads at once; if that fails, it has to expire.

        A Lease that another replica has taken is left alone.
        """
        self._stop("this replica is stopped")
        try:
            async with asyncio.timeout(CALL_S):
                found = await self._api.get(self._path)
                if (found.get("spec") or {}).get("holderIdentity") != self._me:
                    return
                held = self._held_by_me(found)
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
