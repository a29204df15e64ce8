# SPDX-License-Identifier: Apache-2.0
"""A member's departure on purpose: deletes its record, and revokes its lease."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from random import Random
from time import time

from rdzv.errors import StoreAmbiguous, StoreError
from rdzv.job import JobClient
from rdzv.members.registration import Held
from rdzv.membership import snapshot_of
from rdzv.paging import read_all
from rdzv.records.history import HistoryEntry
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, GuardedWrites, Operation, Put

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.3
READ_TIMEOUT_S = 2.0


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
