# SPDX-License-Identifier: Apache-2.0
"""The drain of one member by hand: asked for, followed, cancelled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from time import monotonic, time

from agent.job_config import JobConfig
from agent.verdict.view import present_view
from console.job.changing import no_member, requester, write
from console.job.reading import connected, news
from launcher_shim.pod.hold import reserve_s
from rdzv.drain.standing import phase_of
from rdzv.drain.transactions import cancel, first_write, take_over
from rdzv.errors import MembershipError
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.records.drain import Drain
from rdzv.records.job import Member
from rdzv.snapshot import Snapshot, is_enough, listing_of
from rdzv.store import Compare, GuardedWrites

LOST_S = 3.0
"""Time for a member whose lease has expired to return, before it is reported as lost."""

RECORDED_S = 15.0
"""Time for a sidecar to put back a drain that the store has lost: as long as other members are
given to return after a cut."""

AGAIN_S = 10.0
"""Interval at which the seconds left are printed again while nothing else changes."""

STATUS = {"committed": 0, "expired": 3, "cancelled": 4, "lost": 5, "uncommitted": 6}
"""Exit status by the outcome of the drain."""


Report = Callable[[str, str, str, str], None]


class DrainByHand:
    """The drain of one member, as requested by an operator.

    ``report`` gets the member, the phase, a sentence, and the outcome; empty while there is none.
    """

    def __init__(self, config: JobConfig, member: str, reason: str, report: Report) -> None:
        self._config = config
        self._member = member
        self._reason = reason
        self._report = report
        self._keys = JobKeys(config.namespace, config.job)

    async def drain(self, deadline_s: float, wait: bool) -> int:
        """Start the drain if there is none, or take over the controller's; return the status."""
        async with connected(self._config) as client:
            pod_uid = self._find(client.membership.snapshot()).pod_uid
            await write(client, partial(self.planned, deadline_s=deadline_s))
            return await self.follow(client, pod_uid, to_the_end=wait)

    def planned(self, snapshot: Snapshot, *, deadline_s: float) -> GuardedWrites | None:
        """Return the write that starts the drain or takes it over; None if there is none to make.

        Raises ``ConfigError`` if the job does not have the member.
        """
        member = self._find(snapshot)
        record = self._record(member, deadline_s)
        if member.pod_uid in snapshot.drains:
            return take_over(self._keys, snapshot, record)
        return self._notice(snapshot, member, record)

    async def cancel(self) -> int:
        """Cancel the drain; return the exit status."""
        async with connected(self._config) as client:
            before = client.membership.snapshot()
            pod_uid, generation = self._find(before).pod_uid, _generation(before)
            tried = False

            def plan(snapshot: Snapshot) -> GuardedWrites | None:
                nonlocal tried
                gone = pod_uid not in snapshot.drains and not _began_anew(snapshot, generation)
                if tried and gone:
                    return None  # only the answer was lost
                planned = cancel(self._keys, snapshot, pod_uid)
                if isinstance(planned, str):
                    raise MembershipError(
                        f"the drain of {self._member} cannot be cancelled: {planned}; see"
                        " docs/drain.md#by-hand"
                    )
                tried = True
                return planned

            await write(client, plan)
        self._report(self._member, "cancelled", f"the drain of {self._member} is cancelled", "")
        return 0

    def _find(self, snapshot: Snapshot) -> Member:
        member = snapshot.members.get(self._member)
        if member is None:
            raise no_member(self._config.job, self._member, snapshot)
        return member

    def _record(self, member: Member, deadline_s: float) -> Drain:
        return Drain(
            pod_uid=member.pod_uid,
            member=member.name,
            reason=self._reason,
            source="operator",
            seconds_left=deadline_s,
            reserve_s=reserve_s(deadline_s),
            requested_by=requester(),
            at_unix_s=time(),
        )

    def _notice(self, snapshot: Snapshot, member: Member, record: Drain) -> GuardedWrites:
        assert snapshot.job is not None
        keys = self._keys.in_generation(snapshot.job.generation)
        compares, operations = first_write(self._keys, snapshot, record)
        there = Compare(keys.member(member.name), "mod", "=", member.mod_revision)
        return [*compares, there], operations

    async def follow(self, client: JobClient, pod_uid: str, *, to_the_end: bool) -> int:
        """Report each phase; return the exit status of the outcome.

        Without ``to_the_end``, return 0 after the first phase that is not the last.
        """
        membership = client.membership
        generation = _generation(membership.snapshot())
        reported: tuple[object, ...] = ()
        lost_at_s: float | None = None
        known = membership.snapshot()
        while True:
            sequence, snapshot = client.mirror.sequence, membership.snapshot()
            if pod_uid in snapshot.drains:
                known = snapshot
            finishing = present_view(client).finishes(self._member)
            name, sentence, ending = self._stand(
                snapshot, known, pod_uid, generation, finishing=finishing
            )
            if ending != "lost":
                lost_at_s = None
            elif lost_at_s is None or monotonic() < lost_at_s:
                recorded = pod_uid in snapshot.drains or _began_anew(snapshot, generation)
                patience_s = LOST_S if recorded else RECORDED_S
                lost_at_s = lost_at_s or monotonic() + patience_s
                change = partial(membership.changed_from, snapshot)
                await _within(max(0.0, lost_at_s - monotonic()), change)
                continue
            record = snapshot.drains.get(pod_uid)
            waits = record is not None and name != "finishing" and not ending
            left_s = record.left_s(time()) if record is not None and waits else None
            # A drain may only wait, as for others to be listed: say again how long it still can.
            news_of = (name, sentence, None if left_s is None else left_s // AGAIN_S)
            if news_of != reported:
                reported = news_of
                left = "" if left_s is None else f"; {left_s:.0f} s to its deadline"
                self._report(self._member, name, f"{sentence}{left}", ending)
            if ending:
                return STATUS[ending]
            if not to_the_end:
                return 0
            wait_s = math.inf if left_s is None else left_s % AGAIN_S + 0.1
            change = partial(client.mirror.changed_after, sequence)
            goes_on = f"the drain of {self._member} goes on by itself"
            await news(client.mirror, partial(_within, wait_s, change), goes_on)

    def _stand(
        self, snapshot: Snapshot, known: Snapshot, pod_uid: str, generation: int, *, finishing: bool
    ) -> tuple[str, str, str]:
        """Return the phase, a sentence and the outcome; ``known`` has the drain as last seen."""
        record = snapshot.drains.get(pod_uid)
        if record is None:
            if _began_anew(snapshot, generation):
                return "lost", "the job is in a new generation", "lost"
            if self._is_cancelled(snapshot, known, pod_uid):
                return "cancelled", f"the drain of {self._member} was cancelled", "cancelled"
            return (
                "lost",
                f"the store has lost the drain of {self._member}, and its sidecar has not put it"
                " back: drain it again",
                "lost",
            )
        phase = phase_of(snapshot, record, finishing=finishing)
        present = any(member.pod_uid == pod_uid for member in snapshot.members.values())
        if not phase.outcome and not present:
            return "lost", f"{self._member} was lost before it was released", "lost"
        least = "" if snapshot.rules is None else f" ({snapshot.rules.policy.smallest})"
        kept = phase.name in ("draining", "saved") and not is_enough(snapshot, listing_of(snapshot))
        why = f"; fewer than min{least} would be left" if kept else ""
        return phase.name, f"{phase.sentence}{why}", phase.outcome

    def _is_cancelled(self, snapshot: Snapshot, known: Snapshot, pod_uid: str) -> bool:
        """Decide whether a user has cancelled the drain; its record is gone.

        A cancellation rewrites the member's incarnation with the same number; a registration after
        a restore of the store changes the number.
        """
        drain, before = known.drains.get(pod_uid), known.incarnations.get(self._member)
        now = snapshot.incarnations.get(self._member)
        if drain is None or before is None:
            return True
        if now is None:
            return False
        return now.mod_revision > drain.mod_revision and now.number == before.number


def _generation(snapshot: Snapshot) -> int:
    return snapshot.job.generation if snapshot.job else 0


def _began_anew(snapshot: Snapshot, generation: int) -> bool:
    """Return whether the job has left ``generation``; its drains have no effect any more."""
    return snapshot.job is None or snapshot.job.generation != generation


async def _within(timeout_s: float, change: Callable[[], Coroutine[None, None, object]]) -> None:
    """Wait for ``change``, for so long at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s if math.isfinite(timeout_s) else None):
            await change()
