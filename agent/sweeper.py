# SPDX-License-Identifier: Apache-2.0
"""Deletes what pods that are gone have left in the store; the oldest listed member does it."""

from __future__ import annotations

from functools import partial

from agent.orphans import orphans
from launcher_shim.c10d.stale_worker_keys import stale_worker_keys
from rdzv.members.leftovers import leftovers
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, KeyValue

PAUSE_S = 5.0
"""Pause between two sweeps, in seconds: there is no hurry, and a burst of changes needs one
sweep."""

BATCH_MAX = 50
"""Keys dropped by one transaction, each with a compare: etcd takes 128 of either."""


class Sweeper(Reconciler):
    """The sweeper: it keeps the store's size independent of how many pods a job has ever had."""

    def __init__(self, kernel: Kernel, me: str, pod_uid: str, *, pause_s: float = PAUSE_S) -> None:
        super().__init__(kernel, "sweeper")
        self._me = me
        self._pod_uid = pod_uid
        self._pause_s = pause_s

    async def step(self) -> Outlook:
        """Sweep after each change of the membership."""
        membership = self.kernel.client.membership
        snapshot = membership.snapshot()
        surplus = self._surplus(snapshot) if self._is_mine(snapshot) else []
        return Outlook(
            partial(membership.changed_from, snapshot),
            write=_deletion(surplus[:BATCH_MAX]) if surplus else None,
            gather_s=self._pause_s,
        )

    def _is_mine(self, snapshot: Snapshot) -> bool:
        # By age, and not by who trains: a sidecar can sweep without a launcher beside it.
        listed = self.kernel.client.membership.listing().listed
        # The name of a fenced pod is still listed, but another pod holds it.
        return bool(listed) and (listed[0].name, listed[0].pod_uid) == (self._me, self._pod_uid)

    def _surplus(self, snapshot: Snapshot) -> list[KeyValue]:
        assert snapshot.job is not None
        keys = self.kernel.client.keys
        kvs = tuple(self.kernel.client.mirror.kvs.values())
        here = keys.in_generation(snapshot.job.generation)
        return [
            *leftovers(keys, snapshot, kvs),
            *orphans(here, snapshot, kvs),
            *stale_worker_keys(here, kvs),
        ]


def _deletion(kvs: list[KeyValue]) -> DueWrite:
    # A key that was written since then is in use: the whole batch is decided again.
    unchanged = [Compare(kv.key, "mod", "=", kv.mod_revision) for kv in kvs]
    return DueWrite(lambda: (unchanged, [Delete(kv.key) for kv in kvs]))
