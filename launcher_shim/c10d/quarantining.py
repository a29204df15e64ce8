# SPDX-License-Identifier: Apache-2.0
"""The quarantine record of this sidecar's own member, kept for as long as torchruns die here."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from time import time

from launcher_shim.c10d.rounds.claim import Ending
from launcher_shim.c10d.torchrun_lives import TorchrunLives
from launcher_shim.rundir.step_lines import StepLine
from rdzv.errors import LeaseLost, StoreError
from rdzv.job import JobClient
from rdzv.members.guard import Registered
from rdzv.members.registration import Identity
from rdzv.records.history import Happening, HistoryEntry, entry_operations
from rdzv.records.quarantine import (
    Death,
    Quarantine,
    QuarantineDecision,
    Terms,
    after_death,
    after_time,
)
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, Operation, Put

log = logging.getLogger(__name__)

RETRY_S = 1.0

SEE_OWN_WRITE_S = 5.0
"""Maximum wait for the watch to show a write: a write that a restored store has lost never
comes."""

REMEMBERED = 8
"""Maximum number of deaths that wait while the store is away; more make no difference."""


class Quarantining:
    """The count of this pod's torchruns' deaths; admits the member once one has lived for a while.

    ``registered``: the registration in force, or None. ``clock`` is monotonic, in seconds.
    ``steps`` reads the steps that the ranks of this pod report; may block.
    """

    def __init__(
        self,
        client: JobClient,
        identity: Identity,
        *,
        registered: Callable[[], Registered | None],
        clock: Callable[[], float],
        terms: Terms,
        steps: Callable[[], Sequence[StepLine]] = tuple,
    ) -> None:
        self._client = client
        self._member = identity.member
        self._pod_uid = identity.pod_uid
        self._registered = registered
        self._clock = clock
        self._terms = terms
        self._died: deque[Death] = deque(maxlen=REMEMBERED)
        self._lives = TorchrunLives(steps, self._count)
        self._alive: tuple[str, float] | None = None
        self._waited_s = 0.0
        self._seen: tuple[Quarantine | None, float] = (None, 0.0)
        self._stirred = asyncio.Event()

    def came(self, nonce: str) -> None:
        """Note a torchrun that asks for a place."""
        self._lives.came(nonce)
        if self._alive is None or self._alive[0] != nonce:
            self._alive = (nonce, self._clock() - self._waited_s)
            self._stirred.set()

    def ended(self, nonce: str, how: Ending, world_s: float | None = None) -> None:
        """Note that a torchrun has ended, and for how long it was in a world, if it was in one.

        A torchrun of a version (before 2.3) without a redundancy list gives up if it is kept out
        for longer than its join timeout. That is no death: the next one goes on with the time it
        lived.
        """
        if self._alive is not None and self._alive[0] == nonce:
            lived_s = self._clock() - self._alive[1]
            self._waited_s = lived_s if how == "gave up" else 0.0
            self._alive = None
        if how == "died":
            self._lives.ended(Death(nonce, world_s=world_s))

    def _count(self, death: Death) -> None:
        self._died.append(death)
        self._stirred.set()

    async def run(self) -> None:
        """Write each change of the record until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lives.run(), name="lives of torchruns")
            tasks.create_task(self._keep(), name="quarantine record")

    async def _keep(self) -> None:
        while True:
            self._stirred.clear()
            snapshot = self._client.membership.snapshot()
            wake_at_s = math.inf
            try:
                wake_at_s = await self._step(snapshot)
            except LeaseLost:
                # The store may show a registration that is not in force yet, with no later change
                # to wake on.
                wake_at_s = self._clock() + RETRY_S
            except StoreError as error:
                log.info("cannot update the quarantine record, retrying: %s", error)
                wake_at_s = self._clock() + RETRY_S
            await self._change_from(snapshot, wake_at_s)

    async def _step(self, snapshot: Snapshot) -> float:
        """Write once if something is due; return when to check again without a change."""
        registered = self._registered()
        if snapshot.job is None or registered is None:
            return math.inf
        record, now = snapshot.quarantines.get(self._member), self._clock()
        if record != self._seen[0]:
            self._seen = (record, now)
        # Another death may come during this one's check of the ranks' steps: it has its own turn.
        death = self._died[0] if self._died else None
        if death is not None:
            decision = after_death(record, self._member, self._pod_uid, death, self._terms)
        elif record is None or record.pod_uid != self._pod_uid:
            return math.inf
        else:
            nonce, alive_s = self._alive or ("", None)
            steps = await self._lives.made(nonce) if record.fruitless and nonce else None
            decision = after_time(now, record, self._seen[1], alive_s, self._terms, steps)
        if decision.record is None and not decision.drop:
            if death is not None:
                self._died.popleft()
                return now
            return decision.wake_at_s
        compares, operations = self._transaction(snapshot, record, decision)
        result = await self._client.store.txn([*compares, registered.holds()], operations)
        if result.succeeded:
            log.log(
                logging.WARNING if decision.record and decision.record.out else logging.INFO,
                "%s: %s",
                self._member,
                decision.reason,
                extra={"event": "quarantine"},
            )
            # Wait for the watch: the record it shows has this death counted.
            await self._reach(result.revision)
            return now
        return now + RETRY_S

    async def _reach(self, revision: int) -> None:
        try:
            async with asyncio.timeout(SEE_OWN_WRITE_S):
                await self._client.mirror.reached(revision)
        except TimeoutError:
            log.info("the watch has not shown a quarantine record in %.0f s", SEE_OWN_WRITE_S)

    def _transaction(
        self, snapshot: Snapshot, record: Quarantine | None, decision: QuarantineDecision
    ) -> tuple[list[Compare], list[Operation]]:
        assert snapshot.job is not None
        keys = self._client.keys
        key = keys.in_generation(snapshot.job.generation).quarantine(self._member)
        # A corrupt record counts as none, whoever wrote it.
        unchanged = Compare(key, "mod", "=", record.mod_revision if record else 0)
        compares = [] if key in snapshot.corrupt else [unchanged]
        after = decision.record
        operations: list[Operation] = [Delete(key) if after is None else Put(key, after.to_json())]
        is_out, was_out = after is not None and after.out, record is not None and record.out
        happening: Happening = "quarantine" if is_out else "admit"
        if is_out or was_out:
            deaths = max(one.deaths for one in (after, record) if one is not None)
            entry = HistoryEntry(
                happening,
                self._member,
                decision.reason,
                time(),
                details={"deaths": deaths, "pod_uid": self._pod_uid},
            )
            present = [kv.key for kv in self._client.mirror.under(keys.history)]
            operations += entry_operations(keys, entry, snapshot.revision, present)
        return compares, operations

    async def _change_from(self, snapshot: Snapshot, wake_at_s: float) -> None:
        """Wait for a torchrun, a change of the membership, or ``wake_at_s``."""
        tasks = [
            asyncio.create_task(self._stirred.wait(), name="torchruns"),
            asyncio.create_task(self._client.membership.changed_from(snapshot), name="members"),
        ]
        left_s = max(0.0, wake_at_s - self._clock())
        try:
            await asyncio.wait(
                tasks,
                timeout=left_s if math.isfinite(left_s) else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
