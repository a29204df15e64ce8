# SPDX-License-Identifier: Apache-2.0
"""Deletes what pods that are gone have left in the store; the oldest listed member does it."""

from __future__ import annotations

import asyncio
import logging

from agent.orphans import orphans
from launcher_shim.c10d.stale_worker_keys import stale_worker_keys
from rdzv.errors import StoreError
from rdzv.job import JobClient
from rdzv.members.leftovers import leftovers
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, KeyValue

log = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Pause between two sweeps, in seconds: there is no hurry, and a burst of changes needs one
sweep."""

BATCH_MAX = 50
"""Keys dropped by one transaction, each with a compare: etcd takes 128 of either."""


class Sweeper:
    """The sweeper: it keeps the store's size independent of how many pods a job has ever had."""

    def __init__(
        self,
        client: JobClient,
        me: str,
        pod_uid: str,
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._client = client
        self._me = me
        self._pod_uid = pod_uid
        self._pause_s = pause_s

    async def run(self) -> None:
        """Sweep after each change of the membership, until cancelled."""
        while True:
            snapshot = self._client.membership.snapshot()
            if self._is_mine(snapshot):
                await self._sweep(snapshot)
            await asyncio.sleep(self._pause_s)
            await self._client.membership.changed_from(snapshot)

    def _is_mine(self, snapshot: Snapshot) -> bool:
        # By age, and not by who trains: a sidecar can sweep without a launcher beside it.
        listed = self._client.membership.listing().listed
        # The name of a fenced pod is still listed, but another pod holds it.
        return bool(listed) and (listed[0].name, listed[0].pod_uid) == (self._me, self._pod_uid)

    async def _sweep(self, snapshot: Snapshot) -> None:
        assert snapshot.job is not None
        keys = self._client.keys
        kvs = tuple(self._client.mirror.kvs.values())
        here = keys.in_generation(snapshot.job.generation)
        surplus = [
            *leftovers(keys, snapshot, kvs),
            *orphans(here, snapshot, kvs),
            *stale_worker_keys(here, kvs),
        ]
        for first in range(0, len(surplus), BATCH_MAX):
            await self._drop(surplus[first : first + BATCH_MAX])

    async def _drop(self, kvs: list[KeyValue]) -> None:
        # A key that was written since then is in use: the whole batch waits for the next sweep.
        unchanged = [Compare(kv.key, "mod", "=", kv.mod_revision) for kv in kvs]
        try:
            await self._client.store.txn(unchanged, [Delete(kv.key) for kv in kvs])
        except StoreError as error:
            log.info("cannot delete the records of gone pods before the next sweep: %s", error)
