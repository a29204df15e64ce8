# SPDX-License-Identifier: Apache-2.0
"""The end of a roll-out that was taken back, if no pod registers after it.

A Deployment starts the last pod of the former template before the last one of the newer is gone:
then no registration shows that no member has the newer one, and a present member has to notice.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from time import time

from rdzv.errors import StoreError
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.members.templates import left_to
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Job
from rdzv.records.job_change import change_between
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Operation, Put

log = logging.getLogger(__name__)


class RollBack:
    """The return to this member's template once no member with the present one is left.

    ``patience_s``: how long none must have been there, as one that has lost its lease may come
    back. A shorter one takes a roll-out back for an outage of the store.
    """

    def __init__(self, client: JobClient, registrar: Registrar, *, patience_s: float) -> None:
        self._client = client
        self._registrar = registrar
        self._patience_s = patience_s

    async def run(self) -> None:
        """Follow the membership until cancelled."""
        membership = self._client.membership
        while True:
            snapshot = membership.snapshot()
            if self._left(snapshot) is None:
                await membership.changed_from(snapshot)
                continue
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._upheld()
            except TimeoutError:
                await self._take_over(membership.snapshot())

    def _left(self, snapshot: Snapshot) -> Job | None:
        identity = self._registrar.identity
        return left_to(snapshot, identity.member, identity.template)

    async def _upheld(self) -> None:
        """Wait until a member has the template of the job, or another member has to replace it."""
        while self._left(snapshot := self._client.membership.snapshot()) is not None:
            await self._client.membership.changed_from(snapshot)

    async def _take_over(self, snapshot: Snapshot) -> None:
        before, job, generation = snapshot.job, self._left(snapshot), self._registrar.generation
        if before is None or job is None or generation != job.generation:
            return
        keys = self._client.keys
        operations: list[Operation] = [Put(keys.job, job.to_json())]
        if change := change_between(before, job):
            why = f"no member with the newer template is left: {change}"
            entry = HistoryEntry("set", self._registrar.identity.member, why, time())
            operations += self._client.history(entry)
        try:
            compares = [
                Compare(keys.job, "mod", "=", job.mod_revision),
                self._registrar.guard(generation).holds(),
                # No member has come, or come back, since.
                Compare(
                    keys.in_generation(generation).members,
                    *("mod", "<", snapshot.revision + 1),
                    prefix=True,
                ),
            ]
            done = await self._client.store.txn(compares, operations)
        except StoreError as error:
            log.info("cannot roll back to the previous template, retrying: %s", error)
            return
        # A store that is restored right now may never reach this revision: decide again.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._client.mirror.reached(done.revision)
        if done.succeeded:
            log.info(
                "no member with the newer template is left: rolled back to this pod's template%s",
                f": {change}" if change else "",
                extra={"event": "template"},
            )
