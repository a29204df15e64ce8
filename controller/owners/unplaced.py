# SPDX-License-Identifier: Apache-2.0
"""Writes how many pods of each job no node has room for: no world waits for those."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from controller.cluster.collection import Collection
from controller.defect import tell_defect
from controller.jobs.jobs import Jobs
from controller.jobs.state import JobState
from controller.owners.pods import PodSeen
from injection.job_label import job_label
from rdzv.errors import StoreError
from rdzv.keys import JobKeys
from rdzv.race import first_of
from rdzv.reconcile import Loop, Outlook
from rdzv.store import Compare, Put

log = logging.getLogger(__name__)

GATHER_S = 0.2
"""Delay to batch changes: pods of one owner come together."""
AGAIN_S = 1.0
"""Retry interval after a failed write."""


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
            math.inf if all(written) else self.clock() + AGAIN_S,
            gather_s=GATHER_S,
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
            tell_defect(f"cannot write the pods without a node of {keys.job_name}: {error}", error)
            return True
        return result.succeeded
