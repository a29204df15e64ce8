# SPDX-License-Identifier: Apache-2.0
"""Keeps one member registered: lease, register, renew, register again, leave.

A lost lease means "register again with the next incarnation", never "I am dead": nothing here stops
a launcher. Every write compares what it was planned on, so that a retry is harmless. ``pacing``
decides how soon a registration follows one that failed, or that did not last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

from rdzv.dataclass import dataclass
from rdzv.errors import (
    Fenced,
    RecordError,
    StoreAmbiguous,
    StoreError,
    StoreFull,
    StoreRefused,
)
from rdzv.job import JobClient, Registered
from rdzv.members.lease import (
    RENEWALS_PER_TTL,
    Departure,
    FormerLease,
    MemberLease,
    registration_writes,
)
from rdzv.members.registration import Held, Identity, Refuse, Register, RetryLater, plan
from rdzv.pacing import Pacing
from rdzv.reconcile import first_of
from rdzv.records.job import Incarnation, Job
from rdzv.sentences import Diary
from rdzv.snapshot import Snapshot
from rdzv.store import Compare

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Registration:
    """A registration that was written: its lease, the store's revision, and a sentence to log."""

    held: Held
    lease: MemberLease
    revision: int
    sentence: str


@dataclass(frozen=True, slots=True)
class _Loss:
    """The reason that a registration is over; ``usual`` if nothing has gone wrong."""

    sentence: str
    usual: bool = False


class Registrar:
    """One member's registration.

    ``lease_ttl_s`` is whole: the store counts in seconds. ``clock`` is monotonic, in seconds.
    ``on_held`` is called with each new registration, before it is announced, so that a restarted
    sidecar finds what it held; a disk that hangs does not delay the announcement for long.
    ``fenced``: another pod holds the name or the job, until ``let_in_again`` has returned.
    ``trouble``: why it could not register the last time it tried; empty once it has.
    """

    def __init__(
        self,
        client: JobClient,
        identity: Identity,
        *,
        lease_ttl_s: float,
        clock: Callable[[], float],
        random: Random,
        held: Held | None = None,
        on_held: Callable[[Held], Awaitable[None]] | None = None,
    ) -> None:
        self.identity = identity
        self.keys = client.keys
        self.held = held
        self.registered = asyncio.Event()
        self.fenced = False
        self.trouble = ""
        self._client = client
        self._lease_ttl_s = lease_ttl_s
        self._clock = clock
        self._random = random
        self._on_held = on_held
        self._empty_since_s: float | None = None
        self._refused: Refuse | None = None
        self._known: Job | None = None
        self._pacing = Pacing(lease_ttl_s)
        self._lease: MemberLease | None = None
        self._diary = Diary(log)
        self._former = FormerLease(
            client, identity, lease_ttl_s, clock, random, complain=self._log_change
        )

    @property
    def upheld(self) -> bool:
        """Whether its former registration stays until a full store takes another one."""
        return self._former.upheld

    @property
    def lease_id(self) -> int | None:
        """The lease of the last registration; it may be lost."""
        return self._lease.id if self._lease is not None else None

    @property
    def lease_valid_until_s(self) -> float:
        """The time until which the lease lives at least, on the registrar's clock."""
        return self._lease.valid_until_s if self._lease is not None else float("-inf")

    @property
    def held_generation(self) -> int | None:
        """The generation last held, by this sidecar or the one before it; None before the first."""
        return self.held.generation if self.held is not None else None

    @property
    def generation(self) -> int | None:
        """The generation registered under, or None while this member is not registered."""
        return self.held_generation if self.registered.is_set() else None

    def guard(self, generation: int) -> Registered:
        """Return the guard of writes in ``generation``: it requires this member's registration."""
        member_key = self.keys.in_generation(generation).member(self.identity.member)
        return Registered(member_key, self._lease_in_force, self.registered.wait)

    def fence(self) -> tuple[Compare, ...] | None:
        """Return the compares that hold while this member is registered; None while it is not."""
        generation = self.generation
        return None if generation is None else self.guard(generation).fence()

    def _lease_in_force(self) -> int | None:
        return self.lease_id if self.registered.is_set() else None

    async def run(self) -> None:
        """Register, and stay registered until cancelled.

        Raises ``Fenced`` if another pod holds the name or the job (``let_in_again`` returns when to
        run it again).
        """
        await self._client.mirror.changed_after(0)
        pause_s = 0.0
        while True:
            try:
                written = await self._register(pause_s)
            finally:
                self._former.end()
            registered_s = self._clock()
            self._pacing = self._pacing.after_registering(registered_s)
            await self._hold(written)
            self._pacing = self._pacing.after_loss(written.lease.renewed_s - registered_s)
            pause_s = self._pacing.pause_s(self._random)
            if (complaint := self._pacing.complaint(self._clock())) is not None:
                self._log_change(complaint, logging.WARNING)

    async def let_in_again(self) -> None:
        """Wait until a fenced sidecar may register: the job has its own UID again.

        One that has lost its name waits until cancelled, as another pod has it.
        """
        while True:
            if self._refused is not None and self._refused.for_good:
                await asyncio.Event().wait()
            sequence = self._client.mirror.sequence
            decision = self._plan(waited_s=0.0)
            if isinstance(decision, Refuse):
                self._refused = decision
            elif self._client.membership.snapshot().job is not None:
                # Otherwise it would seed an emptied store with a generation that may be over.
                self.fenced = False
                return
            await self._news(sequence, self._lease_ttl_s)

    async def leave(self, timeout_s: float) -> None:
        """Leave in good order: delete the record, note if no member is left, revoke the lease."""
        held, lease_id = self.held, self.lease_id
        if held is None or lease_id is None:
            return
        self.registered.clear()
        departure = Departure(self._client, self.identity.member, held, lease_id, self._random)
        await departure.leave(timeout_s)

    # -- registering

    async def _register(self, pause_s: float) -> _Registration:
        """Register, after ``pause_s`` at the earliest, and retry until it is done.

        All attempts share one lease, so that none is left over. Raises ``Fenced`` if it is refused.
        """
        self.registered.clear()
        lease = MemberLease(self._client.store, self._lease_ttl_s, self._clock, self._random)
        not_before_s = self._clock() + pause_s
        since_s = self._clock()
        while True:
            sequence = self._client.mirror.sequence
            decision = self._plan(waited_s=self._clock() - since_s)
            if isinstance(decision, Refuse):
                self._refused, self.fenced = decision, True
                raise Fenced(decision.reason)
            if isinstance(decision, RetryLater):
                self.trouble = decision.reason
                self._log_change(decision.reason)
                await self._news(sequence, decision.retry_in_s)
                continue
            if (early_s := not_before_s - self._clock()) > 0:
                # Plan again after the pause, as the snapshot of this plan would be old by then.
                await asyncio.sleep(early_s)
                not_before_s = float("-inf")
                continue
            try:
                written, revision = await self._apply(decision, lease)
            except StoreError as error:
                self._former.after_refusal(error)
                self.trouble = str(error)
                level = logging.WARNING if isinstance(error, StoreRefused) else logging.INFO
                self._log_change(f"cannot register yet, retrying: {error}", level)
                not_before_s = self._clock() + self._next_pause_s()
                continue
            if written is not None:
                self.trouble = ""
                return written
            # Another sidecar's write came first: plan again once the mirror shows it.
            await self._news(sequence, self._next_pause_s(), revision)

    def _plan(self, *, waited_s: float) -> Register | RetryLater | Refuse:
        self._note_emptiness()
        return plan(
            self._client.membership.snapshot(),
            self.identity,
            self.held,
            empty_for_s=self._empty_for_s(),
            lease_ttl_s=self._lease_ttl_s,
            waited_s=waited_s,
            trained=self._trained(),
            known=self._known,
        )

    def _trained(self) -> bool:
        """Return whether the present generation has ever had a world."""
        job = self._client.membership.snapshot().job
        if job is None:
            return False
        keys = self.keys.in_generation(job.generation)
        return any(
            keys.run_of_round(kv.key) is not None for kv in self._client.mirror.under(keys.runs)
        )

    def _next_pause_s(self) -> float:
        self._pacing = self._pacing.after_failure()
        return self._pacing.pause_s(self._random)

    async def _apply(
        self, decision: Register, lease: MemberLease
    ) -> tuple[_Registration | None, int]:
        """Write the registration; return None if an input of its plan has changed since.

        Also returns the revision at which it was written, or at which its plan was found outdated.
        """
        await lease.begin()
        try:
            result = await self._client.store.txn(
                *registration_writes(self._client, self.identity.member, decision, lease.id)
            )
            written, revision = result.succeeded, result.revision
        except (StoreAmbiguous, StoreFull):
            written, revision = await self._was_written(decision.incarnation)
            if not written:
                raise
        if not written:
            return None, revision
        held = self.held = Held(decision.job.generation, decision.incarnation.number)
        self._lease = lease
        sentence = (
            f"registered as incarnation {decision.incarnation.number}"
            f" in generation {decision.job.generation}: {decision.reason}"
        )
        if decision.change:
            sentence += f"; the job goes by this pod's template now: {decision.change}"
        return _Registration(held, lease, revision, sentence), revision

    async def _was_written(self, incarnation: Incarnation) -> tuple[bool, int]:
        """Read who holds the name now; return whether it is ``incarnation``, and the revision.

        That settles a registration that may have been written.
        """
        result = await self._client.store.range(self.keys.incarnation(self.identity.member))
        for kv in result.kvs:
            try:
                holder = Incarnation.from_kv(kv)
            except RecordError:
                return False, result.revision
            same = (holder.number, holder.pod_uid) == (incarnation.number, incarnation.pod_uid)
            return same, result.revision
        return False, result.revision

    # -- holding

    async def _hold(self, written: _Registration) -> None:
        """Renew the lease from the first moment on; return when the registration is gone."""
        loss = await first_of(self._renew(written.lease), self._until_superseded(written))
        self._log_change(loss.sentence, logging.INFO if loss.usual else logging.WARNING)

    async def _renew(self, lease: MemberLease) -> _Loss:
        await lease.renew(self._log_change)
        return _Loss("the lease was lost: registering again")

    async def _until_superseded(self, written: _Registration) -> _Loss:
        """Announce the registration; return why the record in the store is no longer this one."""
        await self._keep(written.held)
        await self._shown(written.revision)
        self.registered.set()
        self._log_change(written.sentence)
        membership = self._client.membership
        while (loss := self._superseded(snapshot := membership.snapshot())) is None:
            await membership.changed_from(snapshot)
        return loss

    async def _keep(self, held: Held) -> None:
        """Keep the registration for the next sidecar here; give up waiting if the disk hangs."""
        if self._on_held is None:
            return
        patience_s = self._lease_ttl_s / RENEWALS_PER_TTL
        try:
            async with asyncio.timeout(patience_s):
                await self._on_held(held)
        except TimeoutError:
            log.warning(
                "the registration was not kept within %.1f s: were this sidecar started again"
                " before the disk answers, it might be taken for a fresh pod",
                patience_s,
                extra={"event": "registration"},
            )

    async def _shown(self, revision: int) -> None:
        """Wait until the mirror shows ``revision``, however far it is behind.

        A restored store may never reach it: then return, too, so that the caller decides again by
        what the store has.
        """
        while True:
            try:
                async with asyncio.timeout(self._lease_ttl_s):
                    await self._client.mirror.reached(revision)
                return
            except TimeoutError:
                with suppress(StoreError):
                    if (await self._client.store.range(self.keys.job)).revision < revision:
                        return

    def _superseded(self, snapshot: Snapshot) -> _Loss | None:
        assert self.held is not None
        if snapshot.job is None:
            return _Loss("the store has lost the job: registering again")
        self._known = snapshot.job
        if snapshot.job.generation != self.held.generation:
            generation = snapshot.job.generation
            return _Loss(f"the job is in generation {generation}: registering there", usual=True)
        member = snapshot.members.get(self.identity.member)
        if member is None:
            return _Loss("the member record is gone: registering again")
        mine = (self.identity.pod_uid, self.held.incarnation)
        if (member.pod_uid, member.incarnation) != mine:
            return _Loss("the member record is another's: looking who holds the name")
        return None

    # -- small things

    def _note_emptiness(self) -> None:
        now = self._clock()
        if self._client.membership.snapshot().members or not self._client.mirror.healthy(now):
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = now

    def _empty_for_s(self) -> float:
        return 0.0 if self._empty_since_s is None else self._clock() - self._empty_since_s

    async def _news(self, sequence: int, timeout_s: float, revision: int = 0) -> None:
        """Wait until the mirror is past ``sequence`` and shows ``revision``, for a time at most."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.mirror.changed_after(sequence)
                await self._client.mirror.reached(revision)
        except TimeoutError:
            return

    def _log_change(self, sentence: str, level: int = logging.INFO) -> None:
        """Log a sentence when it changes."""
        self._diary.say(sentence, level=level, extra={"event": "registration"})
