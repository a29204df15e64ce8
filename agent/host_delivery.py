# SPDX-License-Identifier: Apache-2.0
"""Keeps the delivered host list in step with the membership."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import cache, partial

from agent.rundir import HOSTS_NAME, RunDir
from launcher_shim.horovod import hosts
from rdzv.history import departures
from rdzv.keys import JobKeys
from rdzv.listing import Listing, decide
from rdzv.membership import Membership
from rdzv.model import Snapshot
from rdzv.watching import Mirror

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 5.0
"""Until a list that the disk did not take is tried again."""


class HostDelivery:
    """Renders the host list at each change and renames it into place.

    ``clock`` is monotonic, in seconds. ``delivered`` is set once there is a list. ``held`` gives
    the generation that the member is in: the hosts of another life are not for its launcher.
    ``nudges`` says that a horovodrun reads the list: it is reminded of what it may have missed.
    """

    def __init__(
        self,
        run_dir: RunDir,
        mirror: Mirror,
        membership: Membership,
        generation: int,
        clock: Callable[[], float],
        held: Callable[[], int | None] = lambda: None,
        *,
        nudges: bool = False,
    ) -> None:
        self.delivered = asyncio.Event()
        self.listing = Listing(0)
        self._run_dir = run_dir
        self._mirror = mirror
        self._membership = membership
        self._keys: JobKeys = membership.keys
        self._clock = clock
        self._list = hosts.HostList(generation=generation)
        self._generation = generation
        self._held = held
        self._nudges = nudges

    async def run(self) -> None:
        """Deliver for ever; begins with what the run directory had before."""
        former = await asyncio.to_thread(self._run_dir.hosts)
        self._list = hosts.parse(former, self._generation, self._clock())
        delivered = former
        while True:
            snapshot = self._membership.snapshot()
            foreign = snapshot.job is not None and self._held() not in (
                None,
                snapshot.job.generation,
            )
            if not foreign:
                self._decide(snapshot)
            text = self._list.render()
            if text != delivered and await self._deliver(text):
                delivered = text
            if text == delivered:
                self.delivered.set()
            retry = foreign or text != delivered
            await self._change_from(snapshot, RETRY_PAUSE_S if retry else self._pause_s())

    async def _deliver(self, text: str) -> bool:
        """Rename a list into place; False if the disk does not take it: the former one stays."""
        try:
            await asyncio.to_thread(self._run_dir.deliver_hosts, text)
        except OSError as error:
            log.error(
                "%s cannot be written (%s): launchers go on with the former host list",
                self._run_dir.path / HOSTS_NAME,
                error.strerror,
                extra={"event": "hosts_not_delivered"},
            )
            return False
        return True

    def _decide(self, snapshot: Snapshot) -> None:
        listing = decide(snapshot)
        if listing.standby:
            # Which workers run where is known to horovodrun alone. What it was told last stands for
            # that: nothing in the store does, as a round and its nodes do for torchrun.
            listing = decide(snapshot, self._list.places(snapshot.members))
        if listing.reason != self.listing.reason:
            log.info("%s", listing.reason, extra={"event": "listing", "revision": listing.revision})
        self.listing = listing
        now = self._clock()
        before = self._list
        self._list = hosts.follow(
            before,
            listing,
            # A store that lost the job has not begun another life of it.
            snapshot.job.generation if snapshot.job else self._list.generation,
            left=self._left(snapshot),
            now=now,
            healthy_for_s=self._mirror.healthy_for_s(now),
            heard_s=self._mirror.heard_s,
            outdated=partial(_outdated, snapshot),
        )
        if self._list.overdue(now):
            self._mirror.ask()
        if self._list.kept and self._list.kept != before.kept:
            log.warning(
                "every host goes at once: %s stays on the list until another has been on it for"
                " %g s, so that Horovod can hand the training state over",
                self._list.kept,
                hosts.SETTLE_S,
                extra={"event": "overlap"},
            )
        if self._nudges:
            self._list = self._list.nudged(now)

    def _left(self, snapshot: Snapshot) -> Callable[[hosts.Host], bool]:
        """Tell whether a lost host drains, or the history says that it left after its record was
        made.

        Either is read when first asked, once for all hosts: hundreds may go together.
        """
        drains = snapshot.drains.values()
        drained = cache(lambda: {hosts.token_of(one.member, one.pod_uid) for one in drains})
        departed = cache(lambda: departures(self._mirror.under(self._keys.history)))
        return lambda host: (
            host.token in drained() or departed().get(host.member, 0) > host.revision
        )

    def _pause_s(self) -> float | None:
        """For how long the list stands if nothing happens; None: for ever."""
        checks_s = [self._list.next_nudge_s()] if self._nudges else []
        if (check_s := self._list.next_check_s()) is not None:
            checks_s.append(check_s)
        return max(0.1, min(checks_s) - self._clock()) if checks_s else None

    async def _change_from(self, snapshot: Snapshot, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._membership.changed_from(snapshot)
        except TimeoutError:
            return


def _outdated(snapshot: Snapshot, host: hosts.Host) -> bool:
    """Whether the record of a host's name is of a pod before it, as in a restored store."""
    member = snapshot.members.get(host.member)
    return (
        member is not None
        and member.created_revision < host.revision
        and hosts.token_of(member.name, member.pod_uid) != host.token
    )
