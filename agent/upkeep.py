# SPDX-License-Identifier: Apache-2.0
"""The upkeep of the store: deletes what gone pods have left, and checks the server's version.

The oldest listed member deletes; each sidecar logs whether the version is fit for a job, as
``muster doctor`` says.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.stages import SHARED_RUN
from rdzv.errors import RecordError, StoreError
from rdzv.job import JobClient
from rdzv.keys import GenerationKeys, last_name
from rdzv.members.gone import kept, leftovers, oldest
from rdzv.reconcile import DueWrite, Kernel, Loop, Outlook, Reconciler
from rdzv.records.history import ROUNDS_PER_LIFE, HistoryEntry
from rdzv.sentences import Diary
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, KeyValue
from rdzv.store.etcd.answers import FLOOR, judge_version

WORKERS = (b"/worker/attempt_", b"init/")
"""Prefixes of the keys of torch's workers there. Keys of other clients are left alone."""


def stale_worker_keys(keys: GenerationKeys, kvs: Iterable[KeyValue]) -> list[KeyValue]:
    """Find the keys that no worker has written since the world before the present one.

    That is the world of every run that goes on, as a worker does not say which run it belongs to.
    """
    kvs = tuple(kvs)
    shared = keys.run(SHARED_RUN)
    of_key: dict[bytes, list[KeyValue]] = {}
    for kv in kvs:
        if kv.key.startswith((shared.kv, shared.sums, shared.queues)):
            name = shared.split(kv.key)[1]
            if name.startswith(WORKERS):
                of_key.setdefault(name, []).append(kv)
    if not of_key:
        return []
    since = min(_formed_before(keys, kvs).values(), default=0)
    stale = [parts for parts in of_key.values() if max(part.mod_revision for part in parts) < since]
    return [kv for parts in stale for kv in parts]


def _formed_before(keys: GenerationKeys, kvs: Iterable[KeyValue]) -> Mapping[str, int]:
    """Return the revision of the world before the present one, by open run; 0 if unknown."""
    open_runs: set[str] = set()
    formed: dict[str, list[tuple[int, int]]] = {}
    for kv in kvs:
        try:
            if kv.key.startswith(keys.runs):
                run_id = keys.run_id_of(kv.key)
                if kv.key == keys.run(run_id).round and not Round.from_kv(kv).closed:
                    open_runs.add(run_id)
            elif kv.key.startswith(keys.job.history):
                details = HistoryEntry.from_kv(kv).details
                run_id, number = str(details.get("run_id", "")), details.get("round")
                if isinstance(number, int) and number // ROUNDS_PER_LIFE == keys.generation - 1:
                    formed.setdefault(run_id, []).append((number, kv.mod_revision))
        except RecordError:
            continue
    return {
        run_id: sorted(rounds)[-2][1] if len(rounds := formed.get(run_id, [])) > 1 else 0
        for run_id in open_runs
    }


_AUTHOR = re.compile(r"(?P<member>.+?)\.(?:[0-9a-f]{12}\.\d+|[0-9a-f]{32})(?::\d+)?")
"""Names that ``Endpoint`` gives its clients: one of its own, and one behind a relay."""


def orphans(keys: GenerationKeys, snapshot: Snapshot, kvs: Iterable[KeyValue]) -> list[KeyValue]:
    """Return the connection records of members that are gone, but for the newest ones."""
    of_gone = [
        kv
        for kv in kvs
        if kv.key.startswith(keys.runs)
        and kv.key.startswith(keys.run(keys.run_id_of(kv.key)).operations)
        and (author := _AUTHOR.fullmatch(last_name(kv.key))) is not None
        and author["member"] not in snapshot.members
    ]
    return oldest(of_gone, kept(snapshot))


SWEEP_PAUSE_S = 5.0
"""Pause between two sweeps, in seconds: there is no hurry, and a burst of changes needs one
sweep."""

BATCH_MAX = 50
"""Keys dropped by one transaction, each with a compare: etcd takes 128 of either."""


class Sweeper(Reconciler):
    """The sweeper: it keeps the store's size independent of how many pods a job has ever had."""

    def __init__(
        self, kernel: Kernel, me: str, pod_uid: str, *, pause_s: float = SWEEP_PAUSE_S
    ) -> None:
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
            burst_s=self._pause_s,
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


log = logging.getLogger(__name__)

VERSION_LOOK_S = 3600.0
"""Interval of the check, in seconds: members of a cluster are replaced while a job runs, also by
older ones, and no event tells of it."""


class StoreVersion(Loop):
    """The check of the store member that this sidecar talks to, at start and every ``repeat_s``.

    An unfit version causes a warning and no more: the operator of the job may have no other.
    """

    def __init__(
        self, client: JobClient, clock: Callable[[], float], *, repeat_s: float = VERSION_LOOK_S
    ) -> None:
        super().__init__(clock)
        self._client = client
        self._repeat_s = repeat_s
        self._diary = Diary(log)

    async def step(self) -> Outlook:
        """Check once the store can be read, then every ``repeat_s``."""
        if not self._client.mirror.loaded:
            return Outlook(partial(self._client.mirror.changed_after, 0))
        try:
            status = await self._client.store.status()
        except StoreError as error:
            log.info("cannot read the version of the store: %s", error)
        else:
            self._log_change(status.endpoint, status.version)
        return Outlook(look_at_s=self.clock() + self._repeat_s)

    def _log_change(self, endpoint: str, version: str) -> None:
        level, why = judge_version(version)
        fault = level == "fault"
        sentence = f"the store at {endpoint}: {why}" + (f": use {FLOOR}, or later" if fault else "")
        extra = {"event": "store_version", "version": version}
        severity = logging.WARNING if fault else logging.INFO
        self._diary.say(sentence, level=severity, extra=extra, topic=why)
