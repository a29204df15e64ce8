# SPDX-License-Identifier: Apache-2.0
"""Writes to each job's record what the cluster says of it: desired nodes, and pods without a place.

Replicas of the job's owner become ``desired``, and the owner is annotated. No world waits for pods
that no node has room for.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from time import time

from controller import owner_kinds
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from controller.jobs import Jobs, JobState
from controller.owner_kinds import REPLICAS
from controller.owners import FRESH_S, Owners, OwnerSeen, PodSeen, annotations_of, due_s
from injection.kinds import job_label
from rdzv.errors import ClusterError, ClusterUnavailable, StoreError
from rdzv.keys import JobKeys
from rdzv.reconcile import Loop, Outlook, first_of, log_defect
from rdzv.records.job import HistoryEntry, entry_operations
from rdzv.store import Compare, Put

log = logging.getLogger(__name__)

LOOKED_AT_S = FRESH_S + 5.0
"""Time from a job's change to the next read of its owner: no cached copy is used by then."""
GATHER_S = 1.0

UNPLACED_GATHER_S = 0.2
"""Delay to batch changes: pods of one owner come together."""
UNPLACED_AGAIN_S = 1.0
"""Retry interval after a failed write."""


class OwnerReconciler(Loop):
    """The reconciler of jobs with their owners, for the leader.

    ``scales``: whether replicas become ``desired``. ``annotates``: whether owners are annotated.
    """

    def __init__(
        self,
        api: ClusterApi,
        jobs: Jobs,
        owners: Owners,
        clock: Callable[[], float],
        *,
        scales: bool,
        annotates: bool,
    ) -> None:
        super().__init__(clock)
        self._api = api
        self._jobs = jobs
        self._owners = owners
        self._scales = scales
        self._annotates = annotates
        self._before: dict[JobKeys, JobState] = {}
        self._due_s: dict[JobKeys, float] = {}
        self._replicas: dict[JobKeys, int] = {}
        self._rises: dict[JobKeys, tuple[int, float]] = {}
        """Replicas that are not desired yet, and since when."""
        self._written: dict[JobKeys, tuple[dict[str, str], float]] = {}

    async def run(self) -> None:
        """Reconcile until cancelled."""
        await self._jobs.changed_after(0)
        await super().run()

    async def step(self) -> Outlook:
        """Reconcile the jobs that have changed or are due."""
        sequence, now = self._jobs.sequence, self.clock()
        states = self._jobs.states()
        self._forget_all_but(states)
        for keys, job in states.items():
            before = self._before.get(keys)
            changed = before is not job
            if not job.snapshot.members:
                self._due_s.pop(keys, None)
            elif changed or self._due_s.get(keys, math.inf) <= now:
                self._before[keys] = job
                self._due_s[keys] = now + LOOKED_AT_S if changed else math.inf
                await self._keep(keys, job, again=before is None or _moved(before, job))
        due_s = min(self._due_s.values(), default=math.inf)
        return Outlook(partial(self._jobs.changed_after, sequence), due_s, burst_s=GATHER_S)

    def _forget_all_but(self, jobs: Container[JobKeys]) -> None:
        """Drop what is kept of other jobs; a due time of theirs would never be cleared."""
        kept_of_jobs = (self._before, self._due_s, self._replicas, self._rises, self._written)
        for kept in kept_of_jobs:
            for keys in [keys for keys in kept if keys not in jobs]:
                del kept[keys]

    async def _keep(self, keys: JobKeys, job: JobState, *, again: bool) -> None:
        """Reconcile one job; report a defect, and let other jobs go on.

        ``again``: its pods come or go, so that its owner may have been scaled.
        """
        try:
            owner = await self._owners.of(job, again=again)
            if owner is None or owner.path is None:
                return
            if self._scales:
                await self._scale(keys, job, owner)
            if self._annotates:
                await self._note(keys, job, owner)
        except ClusterUnavailable:
            self._due_s[keys] = self.clock() + LOOKED_AT_S
        except Exception as error:
            told = f"cannot reconcile job {keys.job_name} with its owner: {error}"
            log_defect(told, error)

    async def _scale(self, keys: JobKeys, job: JobState, owner: OwnerSeen) -> None:
        replicas, record = owner.replicas, job.snapshot.job
        # A sidecar of 0.1.0 would misinterpret ``desired`` in a record that it rewrites.
        if record is None or any(not one.version for one in job.snapshot.members.values()):
            return
        wanted, why = owner_kinds.desired_nodes(
            replicas, self._replicas.get(keys), record, job.entries_after(0)
        )
        if wanted is None:
            self._see(keys, replicas)
            return
        steady_s = owner_kinds.steady_s(wanted, record, autoscaled=owner.autoscaled)
        if (wait_s := self._wait_s(keys, wanted.replicas, steady_s)) > 0:
            self._due_s[keys] = self.clock() + wait_s
            return
        change = f"desired is {wanted.desired} (before: {record.desired or 'none'})"
        details: dict[str, object] = {REPLICAS: wanted.replicas}
        entry = HistoryEntry("set", "controller", f"{why}: {change}", time(), details)
        present = [kv.key for kv in job.history]
        try:
            result = await self._jobs.store.txn(
                [Compare(keys.job, "mod", "=", record.mod_revision)],
                [
                    Put(keys.job, replace(record, desired=wanted.desired).to_json()),
                    *entry_operations(keys, entry, job.revision, present),
                ],
            )
        except StoreError as error:
            log.warning(
                "cannot write the owner's replicas as desired of job %s, retrying: %s",
                keys.job_name,
                error,
                extra={"event": "desired_not_written"},
            )
            self._due_s[keys] = self.clock() + GATHER_S
            return
        if result.succeeded:
            self._see(keys, replicas)

    def _see(self, keys: JobKeys, replicas: int | None) -> None:
        """Keep the replicas that need no write any more."""
        self._rises.pop(keys, None)
        if replicas:
            self._replicas[keys] = replicas

    def _wait_s(self, keys: JobKeys, replicas: int, steady_s: float) -> float:
        """Return for how long replicas still have to stay as they are."""
        now, rise = self.clock(), self._rises.get(keys)
        if rise is None or rise[0] != replicas:
            rise = self._rises[keys] = (replicas, now)
        return rise[1] + steady_s - now

    async def _note(self, keys: JobKeys, job: JobState, owner: OwnerSeen) -> None:
        wanted = annotations_of(job)
        held, written_s = self._written.get(keys, (_held(owner, wanted), -math.inf))
        now = self.clock()
        wait_s = due_s(now, wanted, held, written_s)
        if wait_s > 0:
            self._due_s[keys] = min(self._due_s.get(keys, math.inf), now + wait_s)
            return
        assert owner.path is not None
        try:
            await self._api.merge(owner.path, {"metadata": {"annotations": wanted}})
        except ClusterError as error:
            log.warning(
                "cannot annotate the owner of job %s, retrying: %s",
                keys.job_name,
                error,
                extra={"event": "owner_not_annotated"},
            )
            self._due_s[keys] = now + LOOKED_AT_S
            return
        self._written[keys] = (wanted, now)


def _held(owner: OwnerSeen, wanted: dict[str, str]) -> dict[str, str]:
    return {key: owner.annotations[key] for key in wanted if key in owner.annotations}


def _moved(before: JobState, now: JobState) -> bool:
    """Return whether pods of the job have come, gone, or begun to go."""
    return _pods(before) != _pods(now)


def _pods(job: JobState) -> tuple[set[str], set[str]]:
    members = {member.pod_uid for member in job.snapshot.members.values()}
    return members, {uid for uid in job.snapshot.drains if uid in members}


def unplaced(pods: Iterable[PodSeen]) -> Counter[tuple[str, str]]:
    """Count the pods that the scheduler has found no node for, by namespace and job label."""
    return Counter((one.namespace, one.job) for one in pods if one.unplaced)


class UnplacedWriter(Loop):
    """The writer of that number, for the leader; one field of the job's record."""

    def __init__(self, jobs: Jobs, pods: Collection[PodSeen]) -> None:
        super().__init__()
        self._jobs = jobs
        self._pods = pods
        self._counted = 0
        self._counts: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        """Keep the number of each job as it is until cancelled."""
        for part in (self._pods, self._jobs):
            await part.changed_after(0)
        await super().run()

    async def step(self) -> Outlook:
        """Write the numbers that have changed."""
        jobs, pods = self._jobs.sequence, self._pods.sequence
        if self._counted != pods:
            self._counted = pods
            self._counts = unplaced(self._pods.items.values())
        written = [
            await self._keep(keys, job, self._counts[keys.namespace, job_label(keys.job_name)])
            for keys, job in self._jobs.states().items()
        ]
        return Outlook(
            lambda: first_of(self._jobs.changed_after(jobs), self._pods.changed_after(pods)),
            math.inf if all(written) else self.clock() + UNPLACED_AGAIN_S,
            burst_s=UNPLACED_GATHER_S,
        )

    async def _keep(self, keys: JobKeys, job: JobState, count: int) -> bool:
        """Write the number of one job if it has changed; return False to be tried again."""
        record = job.snapshot.job
        # The number of a job without members says nothing: its next life begins with a new one.
        if record is None or not job.snapshot.members or record.unplaced == count:
            return True
        made = replace(record, unplaced=count)
        try:
            result = await self._jobs.store.txn(
                [Compare(keys.job, "mod", "=", record.mod_revision)],
                [Put(keys.job, made.to_json())],
            )
        except StoreError as error:
            log.warning(
                "cannot write the pods without a node of job %s, retrying: %s",
                keys.job_name,
                error,
                extra={"event": "unplaced_not_written"},
            )
            return False
        except Exception as error:
            log_defect(f"cannot write the pods without a node of {keys.job_name}: {error}", error)
            return True
        return result.succeeded
