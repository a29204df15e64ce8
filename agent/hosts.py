# SPDX-License-Identifier: Apache-2.0
"""Delivery of the host list, in step with the membership."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from functools import cache, partial

from agent.rundir.files import RunDir
from launcher_shim import hosts
from launcher_shim.hosts import Host, token_of
from launcher_shim.pod.launchers import CENTRAL
from launcher_shim.rundir import layout
from rdzv.drain.standing import is_withdrawn
from rdzv.reconcile import Kernel, Outlook, Reconciler, first_of
from rdzv.records.drain import Drain
from rdzv.records.job import departures
from rdzv.snapshot import Listing, Snapshot, listing_of

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Shortest interval of looks without a change, in seconds."""

RETRY_PAUSE_S = 5.0
"""Retry interval after a host list that the disk did not take, in seconds."""


class HostDelivery(Reconciler):
    """The delivery of the host list: rendered at each change, and renamed into place.

    ``delivered`` is set once there is a list. ``held`` returns the generation that the member is
    in: hosts of another one are not for its launcher. ``nudges``: whether a launcher reads the
    list, so that a missed change is repeated.

    Until it has ``joined``, as ``registered`` says, it delivers the former list without hosts that
    drain or left. If the store answers reads and lets nobody register, all records are gone, and
    all pods train on: no host is removed because it is lost, and none is added.
    """

    def __init__(
        self,
        kernel: Kernel,
        run_dir: RunDir,
        generation: int,
        registered: asyncio.Event,
        held: Callable[[], int | None] = lambda: None,
        *,
        nudges: bool = False,
    ) -> None:
        super().__init__(kernel, "hosts")
        self.joined = False
        self.delivered = asyncio.Event()
        self.listing = Listing(0)
        self._run_dir = run_dir
        self._client = kernel.client
        self._clock = kernel.clock
        self._list = hosts.HostList(generation=generation)
        self._delivered: str | None = None
        self._generation = generation
        self._registered = registered
        self._held = held
        self._nudges = nudges
        self._confirming: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Deliver until cancelled, beginning with the list that the run directory had before."""
        await self._read_former()
        try:
            await super().run()
        finally:
            if self._confirming is not None:
                self._confirming.cancel()

    async def step(self) -> Outlook:
        """Follow the membership, and deliver the list that it makes."""
        if self._confirming is not None and self._confirming.done():
            self._confirming.result()  # raises the task's exception, if any
            self._confirming = None
        self.joined = self.joined or self._registered.is_set()
        snapshot = self._client.membership.snapshot()
        if not self.joined:
            await self._follow_departures(snapshot)
            return Outlook(partial(self._joined_or_changed_from, snapshot))
        foreign = snapshot.job is not None and self._held() not in (None, snapshot.job.generation)
        if not foreign:
            self._decide(snapshot)
        if await self._deliver(self._list.render()):
            self.delivered.set()
        look_at_s = self._clock() + RETRY_PAUSE_S if foreign else self._look_at_s()
        return Outlook(partial(self._client.membership.changed_from, snapshot), look_at_s)

    async def _follow_departures(self, snapshot: Snapshot) -> None:
        if snapshot.job is not None and snapshot.job.generation == self._generation:
            self._list = self._list.without(self._left(snapshot), self._clock())
        if self._list.hosts:
            await self._deliver(self._list.render())

    async def _joined_or_changed_from(self, snapshot: Snapshot) -> None:
        changed = self._client.membership.changed_from(snapshot)
        await first_of(self._registered.wait(), changed)

    async def _read_former(self) -> None:
        try:
            former = await asyncio.to_thread(self._run_dir.hosts)
        except OSError as error:
            former = ""
            log.warning(
                "%s cannot be read (%s): starting without the former host list",
                self._run_dir.path / layout.HOSTS,
                error.strerror,
                extra={"event": "hosts_unreadable"},
            )
        self._delivered = former
        self._list = hosts.parse(former, self._generation, self._clock())

    async def _deliver(self, text: str) -> bool:
        """Rename a list into place; return False if the disk refuses it: the former one stays."""
        if text != self._delivered:
            put = partial(self._run_dir.deliver_hosts, text)
            if not await self.put(put, self._complain, retry_s=RETRY_PAUSE_S):
                return False
            self._delivered = text
        return True

    def _complain(self, error: OSError) -> None:
        log.error(
            "cannot write %s (%s), retrying: launchers keep the previous host list",
            self._run_dir.path / layout.HOSTS,
            error.strerror,
            extra={"event": "hosts_not_delivered"},
        )

    def _decide(self, snapshot: Snapshot) -> None:
        current = self._client.membership.listing()
        if current.standby:
            # Only the launcher knows which workers run where, and the list that it was given last
            # stands in for that: nothing in the store does, unlike a round and its nodes for
            # torchrun.
            able, room = (*current.listed, *current.standby), len(current.listed)
            current = listing_of(snapshot, self._list.places(able, room))
        if current.reason != self.listing.reason:
            log.info("%s", current.reason, extra={"event": "listing", "revision": current.revision})
        self.listing = current
        now = self._clock()
        before = self._list
        self._list = hosts.follow(
            before,
            current,
            # A store that has lost the job has not begun another generation of it.
            snapshot.job.generation if snapshot.job else self._list.generation,
            left=self._left(snapshot),
            now=now,
            healthy_for_s=self._client.mirror.healthy_for_s(now),
            heard_s=self._client.confirmed_s,
            outdated=partial(_outdated, snapshot),
        )
        self._withdraw(is_withdrawn(snapshot), now)
        if self._list.overdue(now) and self._confirming is None:
            self._confirming = asyncio.create_task(self._client.confirm(), name="confirm")
            self._confirming.add_done_callback(lambda _: self.wake())
        if self._list.kept and self._list.kept != before.kept:
            log.warning(
                "every host goes at once: %s stays on the list until another has been on it for"
                " %g s, so that %s can hand the training state over",
                self._list.kept,
                hosts.SETTLE_S,
                CENTRAL.library,
                extra={"event": "overlap"},
            )
        if self._nudges:
            self._list = self._list.nudged(now)

    def _withdraw(self, hidden: bool, now: float) -> None:
        if self._nudges and hidden != self._list.hidden:
            why = "no host is shown: the job is paused" if hidden else "hosts are shown again"
            log.info("%s", why, extra={"event": "hosts_withdrawn", "hidden": hidden})
        self._list = self._list.hiding(hidden, now)

    def _left(self, snapshot: Snapshot) -> Callable[[Host], bool]:
        """Return a test of whether a host drains, or has left after it registered last.

        The drains, and the departures in the history, are read at the first use, once for all
        hosts: hundreds may go together.
        """
        drains = cache(lambda: _by_member(snapshot.drains.values()))
        departed = cache(lambda: departures(self._client.mirror.under(self._client.keys.history)))
        return lambda host: (
            any(
                token_of(host.member, one.pod_uid) == host.token
                for one in drains().get(host.member, ())
            )
            or departed().get(host.member, 0) > _registered_revision(snapshot, host)
        )

    def _look_at_s(self) -> float:
        """Return when to look again if nothing changes."""
        checks_s = [self._list.next_nudge_s()] if self._nudges else []
        # Checks that are due already wait for the store's answer, if it was asked.
        after_s = -math.inf if self._confirming is None else self._clock()
        if (check_s := self._list.next_check_s(after_s)) is not None:
            checks_s.append(check_s)
        return max(self._clock() + LOOK_S, min(checks_s, default=math.inf))


def _by_member(drains: Iterable[Drain]) -> dict[str, list[Drain]]:
    """Group drains by member; to hash a token of each costs seven times as much."""
    grouped: dict[str, list[Drain]] = {}
    for one in drains:
        grouped.setdefault(one.member, []).append(one)
    return grouped


def _registered_revision(snapshot: Snapshot, host: Host) -> int:
    """Return the revision of a host's last registration, as far as it is known.

    A list that is read back does not contain it.
    """
    holder = snapshot.incarnations.get(host.member)
    if holder is None or token_of(holder.member, holder.pod_uid) != host.token:
        return host.revision
    return max(host.revision, holder.mod_revision)


def _outdated(snapshot: Snapshot, host: Host) -> bool:
    """Return whether the record of a host's name is of an earlier pod, as in a restored store."""
    member = snapshot.members.get(host.member)
    return (
        member is not None
        and member.mod_revision < host.revision
        and token_of(member.name, member.pod_uid) != host.token
    )
