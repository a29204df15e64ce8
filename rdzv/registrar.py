# SPDX-License-Identifier: Apache-2.0
"""Keeps one member registered: lease, register, renew, register again, leave.

A lost lease means "register again with the next incarnation", never "I am dead": nothing here
stops a launcher. Every write compares what it was planned on, so that a repetition is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from time import time

from rdzv.errors import (
    Fenced,
    JobMismatch,
    LeaseLost,
    RecordError,
    StoreAmbiguous,
    StoreError,
    StoreUnavailable,
)
from rdzv.history import Happening, HistoryEntry, entry_operations
from rdzv.membership import Membership, snapshot_of
from rdzv.model import Incarnation, Job, Snapshot
from rdzv.registration import Held, Identity, Refuse, Register, Wait, plan
from rdzv.store import Compare, Delete, Operation, Put, Store
from rdzv.watching import Mirror

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.3
RENEWALS_PER_TTL = 3


class Registrar:
    """One member's registration.

    ``clock`` is monotonic, in seconds. ``on_held`` is called with each new registration, before
    it is announced, so that a restarted sidecar finds what it held.
    """

    def __init__(
        self,
        store: Store,
        mirror: Mirror,
        membership: Membership,
        identity: Identity,
        *,
        lease_ttl_s: float,
        clock: Callable[[], float],
        random: Random,
        held: Held | None = None,
        on_held: Callable[[Held], Awaitable[None]] | None = None,
    ) -> None:
        self.identity = identity
        self.keys = membership.keys
        self.held = held
        self.lease_id: int | None = None
        self.lease_valid_until_s = float("-inf")
        self.registered = asyncio.Event()
        self._store = store
        self._mirror = mirror
        self._membership = membership
        self._lease_ttl_s = lease_ttl_s
        self._clock = clock
        self._random = random
        self._on_held = on_held
        self._empty_since_s: float | None = None
        self._said = ""

    @property
    def generation(self) -> int | None:
        """The generation registered under, or None before the first registration."""
        return self.held.generation if self.held and self.registered.is_set() else None

    async def run(self) -> None:
        """Stay registered for ever.

        Raises ``Fenced`` when another pod holds the name or the job, ``JobMismatch`` when the
        settings disagree with the job's.
        """
        await self._mirror.changed_after(0)
        while True:
            await self._register()
            await self._hold()

    async def leave(self, timeout_s: float) -> None:
        """Leave on purpose: delete the record, note if nobody is left, end the lease."""
        held, lease_id = self.held, self.lease_id
        if held is None or lease_id is None:
            return
        self.registered.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._delete_record(held)
                await self._store.lease_revoke(lease_id)
        except (StoreError, TimeoutError) as error:
            log.warning("could not say goodbye, the lease will run out by itself: %s", error)

    async def next_generation(self, seen: Job, reason: str) -> None:
        """Start the next life of the job, if it is still in the one that was ``seen``.

        For a run that was closed by failure and has lost every torchrun. Everybody registers
        again under the new generation; the old one's keys go in the same transaction.
        """
        old = self.keys.in_generation(seen.generation)
        job = replace(seen, generation=seen.generation + 1)
        await self._store.txn(
            [Compare(self.keys.job, "mod", "=", seen.mod_revision)],
            [
                Put(self.keys.job, job.to_json()),
                Delete(old.prefix, prefix=True),
                *self._history("generation", reason),
            ],
        )

    # -- registering

    async def _register(self) -> None:
        self.registered.clear()
        while True:
            self._note_emptiness()
            decision = plan(
                self._membership.snapshot(),
                self.identity,
                self.held,
                empty_for_s=self._empty_for_s(),
                lease_ttl_s=self._lease_ttl_s,
            )
            if isinstance(decision, Refuse):
                raise (Fenced if decision.fenced else JobMismatch)(decision.reason)
            if isinstance(decision, Wait):
                self._say(decision.reason)
                await self._membership_change(decision.retry_in_s)
                continue
            try:
                if await self._apply(decision):
                    return
            except StoreError as error:
                self._say(f"cannot register yet: {error}")
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _apply(self, decision: Register) -> bool:
        """Write the registration; False if what it was planned on has changed since."""
        lease_id = self._random.getrandbits(62) + 1
        granted_at_s = self._clock()
        await self._store.lease_grant(lease_id, round(self._lease_ttl_s))
        sequence = self._mirror.sequence
        try:
            result = await self._store.txn(*self._transaction(decision, lease_id))
            written, revision = result.succeeded, result.revision
        except StoreAmbiguous:
            written, revision = await self._was_written(decision.incarnation)
        if not written:
            await self._store.lease_revoke(lease_id)
            await self._membership_change_after(sequence, RETRY_PAUSE_S)
            return False
        self.held = Held(decision.job.generation, decision.incarnation.number)
        self.lease_id = lease_id
        self.lease_valid_until_s = granted_at_s + self._lease_ttl_s
        if self._on_held is not None:
            await self._on_held(self.held)
        with suppress(TimeoutError):
            # A store that was restored meanwhile may never reach it; what then is found decides.
            async with asyncio.timeout(self._lease_ttl_s):
                await self._mirror.reached(revision)
        self.registered.set()
        self._say(
            f"registered as incarnation {decision.incarnation.number}"
            f" in generation {decision.job.generation}: {decision.reason}"
        )
        return True

    def _transaction(
        self, decision: Register, lease_id: int
    ) -> tuple[list[Compare], list[Operation]]:
        keys = self.keys.in_generation(decision.job.generation)
        incarnation_key = self.keys.incarnation(self.identity.member)
        compares = [
            Compare(self.keys.job, "mod", "=", decision.job.mod_revision),
            Compare(incarnation_key, "mod", "=", decision.incarnation.mod_revision),
        ]
        operations: list[Operation] = []
        if decision.superseded_generation is not None:
            old = self.keys.in_generation(decision.superseded_generation)
            operations.append(Delete(old.prefix, prefix=True))
        if decision.job_changes:
            operations.append(Put(self.keys.job, decision.job.to_json()))
        operations += [
            Put(incarnation_key, decision.incarnation.to_json()),
            Put(keys.member(self.identity.member), decision.member.to_json(), lease_id),
            *self._history("join", decision.reason),
        ]
        return compares, operations

    async def _was_written(self, incarnation: Incarnation) -> tuple[bool, int]:
        """Settle an ambiguous registration by reading who holds the name now."""
        result = await self._store.range(self.keys.incarnation(self.identity.member))
        for kv in result.kvs:
            try:
                holder = Incarnation.from_kv(kv)
            except RecordError:
                return False, result.revision
            same = (holder.number, holder.pod_uid) == (incarnation.number, incarnation.pod_uid)
            return same, result.revision
        return False, result.revision

    # -- holding

    async def _hold(self) -> None:
        """Renew the lease until the registration is gone."""
        interval_s = self._lease_ttl_s / RENEWALS_PER_TTL
        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(self._renew(interval_s), name="renew-lease")
            watching = tasks.create_task(self._until_superseded(), name="watch-own-record")
            done, pending = await asyncio.wait(
                (renewing, watching), return_when=asyncio.FIRST_COMPLETED
            )
            for task in pending:
                task.cancel()
        self._say(next(iter(done)).result())

    async def _renew(self, interval_s: float) -> str:
        """Renew for ever; return why the lease is gone."""
        assert self.lease_id is not None
        while True:
            await asyncio.sleep(interval_s)
            sent_at_s = self._clock()
            try:
                ttl_s = await self._store.lease_keep_alive(self.lease_id, timeout_s=interval_s)
            except LeaseLost:
                return "the lease was lost: registering again"
            except (StoreUnavailable, StoreAmbiguous) as error:
                self._say(f"the lease could not be renewed: {error}")
            else:
                self.lease_valid_until_s = sent_at_s + ttl_s

    async def _until_superseded(self) -> str:
        """Return why the record in the store is no longer this registration."""
        while True:
            snapshot = self._membership.snapshot()
            reason = self._superseded(snapshot)
            if reason is not None:
                return reason
            await self._membership.changed_from(snapshot)

    def _superseded(self, snapshot: Snapshot) -> str | None:
        assert self.held is not None
        if snapshot.job is None:
            return "the store has lost the job: registering again"
        if snapshot.job.generation != self.held.generation:
            return f"the job is in generation {snapshot.job.generation}: registering there"
        member = snapshot.members.get(self.identity.member)
        if member is None:
            return "the member record is gone: registering again"
        mine = (self.identity.pod_uid, self.held.incarnation)
        if (member.pod_uid, member.incarnation) != mine:
            return "the member record is another's: looking who holds the name"
        return None

    # -- leaving

    async def _delete_record(self, held: Held) -> None:
        """Delete the own record; if nobody else is left, note that in the job record."""
        key = self.keys.in_generation(held.generation).member(self.identity.member)
        while True:
            result = await self._store.range(self.keys.prefix, prefix=True)
            snapshot = snapshot_of(self.keys, result)
            job, me = snapshot.job, snapshot.members.get(self.identity.member)
            if job is None or me is None or me.incarnation != held.incarnation:
                return
            compares = [
                Compare(key, "mod", "=", me.mod_revision),
                Compare(self.keys.job, "mod", "=", job.mod_revision),
            ]
            operations: list[Operation] = [Delete(key), *self._history("leave", "it was stopped")]
            other = next((m for m in snapshot.members.values() if m.name != me.name), None)
            if other is None:
                operations.append(Put(self.keys.job, replace(job, vacated=True).to_json()))
            else:
                # Two that leave at once must not both think that the other one stays.
                other_key = self.keys.in_generation(held.generation).member(other.name)
                compares.append(Compare(other_key, "mod", "=", other.mod_revision))
            if (await self._store.txn(compares, operations)).succeeded:
                return

    # -- small things

    def _history(self, what: Happening, why: str) -> tuple[Operation, ...]:
        entry = HistoryEntry(
            what=what,
            member=self.identity.member,
            why=why,
            at_unix_s=time(),
        )
        present = [kv.key for kv in self._mirror.under(self.keys.history)]
        return entry_operations(self.keys, entry, self._mirror.revision, present)

    def _note_emptiness(self) -> None:
        now = self._clock()
        if self._membership.snapshot().members or not self._mirror.healthy(now):
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = now

    def _empty_for_s(self) -> float:
        return 0.0 if self._empty_since_s is None else self._clock() - self._empty_since_s

    async def _membership_change(self, timeout_s: float) -> None:
        await self._membership_change_after(self._mirror.sequence, timeout_s)

    async def _membership_change_after(self, sequence: int, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._mirror.changed_after(sequence)
        except TimeoutError:
            return

    def _say(self, sentence: str) -> None:
        """Log a sentence when it changes."""
        if sentence != self._said:
            self._said = sentence
            log.info("%s", sentence, extra={"event": "registration"})
