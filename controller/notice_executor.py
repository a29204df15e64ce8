# SPDX-License-Identifier: Apache-2.0
"""Executes the decisions on notices while this replica leads, by compare-and-set writes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import time

from controller import notices
from controller.cluster.collection import Collection
from controller.jobs import Jobs, JobState
from controller.notices import (
    Asked,
    NodeSeen,
    NoticeDecision,
    NoticeGiven,
    NoticeLifted,
    NoticePolicy,
    PreemptionSeen,
    after_ask,
    after_lift,
)
from controller.owners import PodSeen
from rdzv.drain.transactions import TOGETHER_MOST, cancel, change, first_write
from rdzv.errors import StoreAmbiguous, StoreError
from rdzv.keys import JobKeys
from rdzv.reconcile import Loop, Outlook, first_of, log_defect
from rdzv.records.drain import CONTROLLER, Drain
from rdzv.records.job import HistoryEntry, entry_operations
from rdzv.store import Compare, Operation

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Retry interval after a failed write."""
DEFECT_AGAIN_S = 30.0
"""Retry interval for a job whose decision raised: it may succeed although nothing changed."""
SEE_S = 10.0
"""Timeout for the watch to show a write."""

GATHER_S = 0.1
"""Delay to batch changes: a change of a node or a pod evaluates every member of every job."""
RESERVE_MOST_S, RESERVE_PART = 5.0, 3
"""The launcher's reserve of a drain: at most this time and this fraction; as in the sidecar."""


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """A job's last evaluation: its state then, and the time of the next one without a change."""

    state: JobState
    due_s: float


class NoticeExecutor(Loop):
    """The executor that requests and cancels drains. ``me``: this replica, for the record."""

    def __init__(
        self,
        jobs: Jobs,
        nodes: Collection[NodeSeen],
        pods: Collection[PodSeen],
        policy: NoticePolicy,
        me: str,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(clock)
        self._jobs = jobs
        self._nodes = nodes
        self._pods = pods
        self._policy = policy
        self._me = me
        self._seen = (0, 0)
        self._by_name: dict[str, NodeSeen] = {}
        self._asked: dict[JobKeys, Mapping[str, Asked]] = {}
        self._evaluated: dict[JobKeys, _Evaluated] = {}
        self._defective: set[JobKeys] = set()
        """Jobs whose last evaluation raised."""

    async def run(self) -> None:
        """Request and cancel drains until cancelled."""
        for part in (self._nodes, self._pods, self._jobs):
            await part.changed_after(0)
        await super().run()

    async def step(self) -> Outlook:
        """Decide for the jobs that have changed or are due, and carry that out."""
        before = (self._jobs.sequence, self._nodes.sequence, self._pods.sequence)
        states = self._jobs.states()
        self._forget_all_but(states)
        if self._seen != before[1:]:
            self._seen = before[1:]
            self._by_name = {node.name: node for node in self._nodes.items.values()}
            self._evaluated.clear()
        for keys, job in states.items():
            last = self._evaluated.get(keys)
            if last is None or last.state is not job or last.due_s <= self.clock():
                made = self._decided(self._by_name, job)
                self._asked[keys] = made.asked
                self._evaluated[keys] = _Evaluated(job, await self._carry_out(keys, made))
                await asyncio.sleep(0)  # the webhook's answers do not wait for all jobs
        due_s = min((one.due_s for one in self._evaluated.values()), default=math.inf)
        jobs, nodes, pods = before
        return Outlook(
            lambda: first_of(
                self._jobs.changed_after(jobs),
                self._nodes.changed_after(nodes),
                self._pods.changed_after(pods),
            ),
            due_s,
            burst_s=GATHER_S,
        )

    def _forget_all_but(self, jobs: Container[JobKeys]) -> None:
        """Drop what is kept of other jobs; a due time of theirs would never be cleared."""
        for keys in [keys for keys in self._evaluated if keys not in jobs]:
            del self._evaluated[keys]
        for keys in [keys for keys in self._asked if keys not in jobs]:
            del self._asked[keys]
        self._defective = {keys for keys in self._defective if keys in jobs}

    def _decided(self, nodes: Mapping[str, NodeSeen], job: JobState) -> NoticeDecision:
        """Decide for one job; after a defect its remembered requests are kept, and others go on."""
        now, asked = self.clock(), self._asked.get(job.keys, {})
        try:
            made = notices.decide_notices(now, nodes, self._pods.items, job, asked, self._policy)
        except Exception as error:
            self._tell(job.keys, error)
            return NoticeDecision(asked=asked, wake_at_s=now + DEFECT_AGAIN_S)
        if not (made.asks or made.lifts or made.marks):
            self._defective.discard(job.keys)
        return made

    async def _carry_out(self, keys: JobKeys, made: NoticeDecision) -> float:
        """Carry out the decision for one job; return the time of the next evaluation."""
        if not (made.asks or made.lifts or made.marks):
            return made.wake_at_s
        try:
            marked = [await self._mark(one) for one in made.marks]
            asked = [
                await self._ask(keys, made.asks[at : at + TOGETHER_MOST])
                for at in range(0, len(made.asks), TOGETHER_MOST)
            ]
            lifted = [await self._lift(one) for one in made.lifts]
        except Exception as error:
            self._tell(keys, error)
            return self.clock() + DEFECT_AGAIN_S
        self._defective.discard(keys)
        return made.wake_at_s if all([*marked, *asked, *lifted]) else self.clock() + AGAIN_S

    def _tell(self, keys: JobKeys, error: Exception) -> None:
        """Log a defect once until the job is fine again, as it is evaluated again and again."""
        if keys not in self._defective:
            self._defective.add(keys)
            log_defect(f"cannot request drains in job {keys.job_name}: {error}", error)

    async def _ask(self, keys: JobKeys, asks: Sequence[NoticeGiven]) -> bool:
        """Request drains in one transaction: sidecars that see only one of two save twice."""
        job = self._jobs.state(keys)
        if job is None or job.snapshot.job is None:
            return False
        live = keys.in_generation(job.snapshot.job.generation)
        compares: list[Compare] = []
        operations: list[Operation] = []
        for ask in asks:
            planned = first_write(keys, job.snapshot, self._drain(ask))
            member = Compare(live.member(ask.member.name), "mod", "=", ask.member.mod_revision)
            compares += [*planned[0], member]
            operations += planned[1]
        if not await self._write(keys, compares, operations):
            return False
        for ask in asks:
            self._asked[keys] = after_ask(self._asked[keys], ask)
            log.info(
                "requested a drain of %s of job %s: %s",
                ask.member.name,
                keys.job_name,
                ask.reason,
                extra={"event": "notice_given", "member": ask.member.name, "reason": ask.reason},
            )
        return True

    def _drain(self, ask: NoticeGiven) -> Drain:
        return Drain(
            pod_uid=ask.member.pod_uid,
            member=ask.member.name,
            reason=ask.reason,
            source=CONTROLLER,
            seconds_left=self._policy.deadline_s,
            reserve_s=min(RESERVE_MOST_S, self._policy.deadline_s / RESERVE_PART),
            requested_by=self._me,
            preempted=ask.preempted,
            at_unix_s=time(),
        )

    async def _mark(self, mark: PreemptionSeen) -> bool:
        job = self._jobs.state(mark.keys)
        if job is None or job.snapshot.job is None:
            return False
        marked = change(mark.keys, job.snapshot, replace(mark.drain, preempted=True))
        if not await self._write(mark.keys, *marked):
            return False
        log.info(
            "%s of job %s is preempted: it waits for no replacement",
            mark.drain.member,
            mark.keys.job_name,
            extra={"event": "preemption_seen", "member": mark.drain.member},
        )
        return True

    async def _lift(self, lift: NoticeLifted) -> bool:
        job = self._jobs.state(lift.keys)
        planned = (
            "it is gone"
            if job is None
            else cancel(lift.keys, job.snapshot, lift.drain.pod_uid, sign_gone=True)
        )
        if job is None or isinstance(planned, str):
            return True
        drain = lift.drain
        entry = HistoryEntry("drain", drain.member, lift.reason, time(), {"outcome": "cancelled"})
        present = [kv.key for kv in job.history]
        compares, operations = planned
        noted = entry_operations(lift.keys, entry, job.revision, present)
        if not await self._write(lift.keys, compares, [*operations, *noted]):
            return False
        self._asked[lift.keys] = after_lift(self._asked[lift.keys], lift, self.clock())
        log.info(
            "cancelled the drain of %s of job %s: %s",
            drain.member,
            lift.keys.job_name,
            lift.reason,
            extra={"event": "notice_lifted", "member": drain.member},
        )
        return True

    async def _write(
        self, keys: JobKeys, compares: Sequence[Compare], operations: Sequence[Operation]
    ) -> bool:
        """Write once, and wait until the watch shows it; return whether it surely succeeded."""
        mirror = self._jobs.mirror
        sequence = mirror.sequence
        try:
            result = await self._jobs.store.txn(compares, operations)
        except StoreAmbiguous:
            with suppress(TimeoutError):
                async with asyncio.timeout(SEE_S):
                    await mirror.changed_after(sequence)
            return False
        except StoreError as error:
            log.warning(
                "cannot write a drain of job %s, retrying: %s",
                keys.job_name,
                error,
                extra={"event": "notice_not_written"},
            )
            return False
        await mirror.shown(result.revision, SEE_S)
        return result.succeeded
