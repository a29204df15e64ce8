# SPDX-License-Identifier: Apache-2.0
"""The lease that a registration hangs on: granted, renewed until it is lost, or revoked on purpose.

Every write of a registered sidecar carries a compare with it. etcd over its quota (NOSPACE) renews
leases and grants none: the lease of the sidecar before this one is renewed meanwhile. It is never
registered on: what the former sidecar has sent may still land, and would then pass for this one's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from random import Random
from time import time

from rdzv.errors import LeaseLost, StoreAmbiguous, StoreError, StoreFull, StoreRefused
from rdzv.job import JobClient
from rdzv.members.registration import Held, Identity, Register
from rdzv.membership import snapshot_of
from rdzv.mirror import read_all
from rdzv.records.job import HistoryEntry
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, GuardedWrites, Operation, Put, Store

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.3
RENEWALS_PER_TTL = 3
RENEWAL_JITTER = 0.1
"""Fraction of the interval by which it varies: sidecars that register in the same second would
otherwise renew at the same moments for ever."""

READ_TIMEOUT_S = 2.0


class MemberLease:
    """One lease of ``ttl_s``, which is whole: the store counts in seconds.

    ``clock`` is monotonic, in seconds; ``valid_until_s`` and ``renewed_s`` are on it. ``former_id``
    is that of a lease which another process was granted; without one, it has an id of its own.
    """

    def __init__(
        self,
        store: Store,
        ttl_s: float,
        clock: Callable[[], float],
        random: Random,
        *,
        former_id: int = 0,
    ) -> None:
        self.id = former_id or random.getrandbits(62) + 1
        self.valid_until_s = float("-inf")
        self.renewed_s = float("-inf")
        self._store = store
        self._ttl_s = ttl_s
        self._clock = clock
        self._random = random
        self._asked_for = False

    async def begin(self) -> None:
        """Grant the lease, or renew it if that was asked for already; may be repeated.

        It then lives for its full TTL from now on. Raises ``StoreError``.
        """
        if self._asked_for:
            asked_at_s = self._clock()
            try:
                await self._store.lease_keep_alive(self.id)
                self.valid_until_s = asked_at_s + self._ttl_s
                return
            except LeaseLost as error:
                log.debug("it ended before the registration was written: %s", error)
        asked_at_s = self._clock()
        self._asked_for = True
        await self._store.lease_grant(self.id, round(self._ttl_s))
        self.valid_until_s = asked_at_s + self._ttl_s

    async def renew(self, complain: Callable[[str], None], *, at_once: bool = False) -> None:
        """Renew the lease until it is lost; ``complain`` is called with the reason of a failure.

        A failure is retried soon: less than another interval may be left of the TTL. ``at_once``:
        it was granted some time ago, and may be about to end.
        """
        interval_s = self._ttl_s / RENEWALS_PER_TTL
        pause_s = 0.0 if at_once else self._jittered_s(interval_s)
        while True:
            await asyncio.sleep(pause_s)
            sent_at_s = self._clock()
            try:
                ttl_s = await self._store.lease_keep_alive(self.id, timeout_s=interval_s)
            except LeaseLost:
                return
            except StoreError as error:
                # Retry refusals, too: rights and passwords may come back, and if not, the lease
                # expires.
                complain(f"the lease could not be renewed, retrying: {error}")
                pause_s = RETRY_PAUSE_S
            else:
                self.renewed_s = sent_at_s
                self.valid_until_s = sent_at_s + ttl_s
                pause_s = self._jittered_s(interval_s)

    def _jittered_s(self, interval_s: float) -> float:
        return interval_s * self._random.uniform(1 - RENEWAL_JITTER, 1 + RENEWAL_JITTER)


class FormerLease:
    """The lease that the record of this pod, ``identity``, hangs on in the store, if there is one.

    ``complain`` is called with the reason of a renewal that fails.

    If the former lease ended meanwhile, the records of a pod in good health would vanish with
    it, and no process could write them again. Once there is a new one it is left to expire, as
    records that are not yet written again hang on it.
    """

    def __init__(
        self,
        client: JobClient,
        identity: Identity,
        ttl_s: float,
        clock: Callable[[], float],
        random: Random,
        complain: Callable[[str], None],
    ) -> None:
        self._client = client
        self._identity = identity
        self._ttl_s = ttl_s
        self._clock = clock
        self._random = random
        self._complain = complain
        self._renewing: asyncio.Task[None] | None = None

    @property
    def upheld(self) -> bool:
        """Whether it is being renewed, so that the records on it stay."""
        return self._renewing is not None and not self._renewing.done()

    def after_refusal(self, error: StoreError) -> None:
        """Go on from a registration that failed: uphold the lease where all are refused.

        A refusal of this sidecar alone lets the lease end: others may go on without this pod.
        """
        if isinstance(error, StoreFull):
            self._uphold()
        elif isinstance(error, StoreRefused):
            self.end()

    def end(self) -> None:
        """Renew it no more."""
        if self._renewing is not None:
            self._renewing.cancel()

    def _uphold(self) -> None:
        member = self._client.membership.snapshot().members.get(self._identity.member)
        if self.upheld or member is None or member.pod_uid != self._identity.pod_uid:
            return
        store = self._client.store
        lease = MemberLease(store, self._ttl_s, self._clock, self._random, former_id=member.lease)
        self._renewing = asyncio.create_task(
            lease.renew(self._complain, at_once=True), name="renew-former-lease"
        )


def registration_writes(
    client: JobClient, name: str, decision: Register, lease_id: int
) -> GuardedWrites:
    """Build the transaction that registers the member ``name`` on a lease."""
    keys = client.keys.in_generation(decision.job.generation)
    incarnation_key = client.keys.incarnation(name)
    compares = [
        Compare(client.keys.job, "mod", "=", decision.job.mod_revision),
        Compare(incarnation_key, "mod", "=", decision.incarnation.mod_revision),
    ]
    if decision.alone_at:
        # A pod that has come since may have the newer template.
        since = decision.alone_at + 1
        compares.append(Compare(keys.members, "mod", "<", since, prefix=True))
    if decision.takes_over is not None:
        pod_uid, as_of = decision.takes_over
        compares.append(Compare(keys.drain(pod_uid), "mod", "<", as_of + 1))
    entries = [HistoryEntry("join", name, decision.reason, time())]
    if decision.change:
        why = f"its template is the newest: {decision.change}"
        entries.append(HistoryEntry("set", name, why, time()))
    operations: list[Operation] = []
    if decision.superseded_generation is not None:
        old = client.keys.in_generation(decision.superseded_generation)
        operations.append(Delete(old.prefix, prefix=True))
    if decision.job_changes:
        operations.append(Put(client.keys.job, decision.job.to_json()))
    operations += [
        Put(incarnation_key, decision.incarnation.to_json()),
        Put(keys.member(name), decision.member.to_json(), lease_id),
        *client.history(*entries),
    ]
    return compares, operations


class Departure:
    """The departure of ``member``, registered as ``held`` on the lease ``lease_id``."""

    def __init__(
        self, client: JobClient, member: str, held: Held, lease_id: int, random: Random
    ) -> None:
        self._client = client
        self._member = member
        self._held = held
        self._lease_id = lease_id
        self._random = random

    async def leave(self, timeout_s: float) -> None:
        """Delete the record, note if no member is left, revoke the lease."""
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    async with asyncio.timeout(timeout_s / 2):
                        await self._delete_record()
                except (StoreError, TimeoutError) as error:
                    # The end of the lease deletes the record, too, and needs no room in the store.
                    why = str(error) or f"no answer within {timeout_s / 2:g} s"
                    log.warning("cannot delete the member record, revoking its lease: %s", why)
                await self._client.store.lease_revoke(self._lease_id)
        except (StoreError, TimeoutError) as error:
            why = str(error) or f"no answer within {timeout_s:g} s"
            log.warning("could not leave, the lease will expire by itself: %s", why)

    async def _delete_record(self) -> None:
        """Delete the own record; if no other member is left, note that in the job record."""
        # A plan from an old snapshot fails its compares, and is made again from a new one.
        snapshot, fresh = self._client.membership.snapshot(), False
        while True:
            planned = self._transaction(snapshot)
            if planned is None:
                if fresh:
                    return
                snapshot, fresh = await self._read(), True
                continue
            try:
                if (await self._client.store.txn(*planned)).succeeded:
                    return
            except StoreAmbiguous as error:
                log.info("whether the record was deleted is unknown, reading it: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)
            snapshot, fresh = await self._read(), True

    def _transaction(self, snapshot: Snapshot) -> GuardedWrites | None:
        """Build the deletion of this registration's record in ``snapshot``; None if it has none."""
        job, me = snapshot.job, snapshot.members.get(self._member)
        if job is None or me is None or me.incarnation != self._held.incarnation:
            return None
        keys = self._client.keys
        here = keys.in_generation(self._held.generation)
        key = here.member(self._member)
        compares = [
            Compare(key, "mod", "=", me.mod_revision),
            Compare(keys.job, "mod", "=", job.mod_revision),
        ]
        entry = HistoryEntry("leave", self._member, "it was stopped", time())
        operations: list[Operation] = [Delete(key), *self._client.history(entry)]
        others = [member for name, member in snapshot.members.items() if name != me.name]
        if not others:
            operations.append(Put(keys.job, replace(job, vacated=True).to_json()))
        else:
            # Two that leave at once must not both rely on the other one to stay. Compare a random
            # one: if all compared the same, all would fail when it leaves with them.
            other = self._random.choice(others)
            compares.append(Compare(here.member(other.name), "mod", "=", other.mod_revision))
        return compares, operations

    async def _read(self) -> Snapshot:
        client = self._client
        read = await read_all(client.store, client.keys.prefix, timeout_s=READ_TIMEOUT_S)
        return snapshot_of(client.keys, read)
