# SPDX-License-Identifier: Apache-2.0
"""The events of a job between two of its states, published as Kubernetes Events by the leader.

``job_events`` is a pure function of both states.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from agent.verdict.states import STATES, StateEvent
from controller.cluster.events import Events, reported_up_to
from controller.jobs import Jobs, JobState
from controller.leadership import Leadership
from controller.owners import Owners
from rdzv.errors import ClusterUnavailable
from rdzv.keys import JobKeys
from rdzv.reconcile import Loop, Outlook, log_defect
from rdzv.records.drain import Drain
from rdzv.records.job import HistoryEntry, Member, shown_round
from rdzv.records.troubles import ordinal

Reason = (
    Literal[
        "Joined",
        "Standby",
        "Draining",
        "Committed",
        "SlowSave",
        "Expired",
        "Lost",
        "Failed",
        "Waiting",
        "Quarantined",
        "Reformed",
    ]
    | StateEvent
)
"""Names of Events. They are an interface, like the names of log events."""

WARNINGS: frozenset[Reason] = frozenset(
    {
        "SlowSave",
        "Expired",
        "Lost",
        "Failed",
        "Waiting",
        "Quarantined",
        "BelowMin",
        "Failing",
        "Stuck",
    }
)

OWNER_RETRY_S = 5.0
"""Retry interval for reading an owner that its Events wait for."""
GATHER_S = 0.2
"""Delay to batch changes: a world that forms changes dozens of keys at once."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event, of a pod by its UID, or of the job alone.

    ``of_job``: whether it is also published at the object that created the pods. ``revision``: the
    store's revision at which it happened.
    """

    reason: Reason
    message: str
    revision: int
    pod_uid: str = ""
    pod: str = ""
    of_job: bool = True


def job_events(
    before: JobState | None, now: JobState, told: int, time_to_save_s: float | None = None
) -> tuple[JobEvent, ...]:
    """Return the events that are new in ``now``, the oldest first.

    ``time_to_save_s``: what the pod with the shortest grace has for a save, if that is known.
    ``before`` is the state whose events were published last. Without it, after a change of leader,
    the events are derived from the records written after the revision ``told``: none is published
    twice, but some of the time between may be missing: of a member that went on standby, or of the
    loss of the last member of all.
    """
    since = told if before is None else before.revision
    found = [
        *_joined(before, now, since),
        *_standing_by(before, now, since),
        *_draining(now, since),
        *_committed(now, since, time_to_save_s),
        *_lost(before, now, since),
        *_written(now, since),
    ]
    return tuple(sorted(found, key=lambda one: (one.revision, one.reason, one.pod)))


def _joined(before: JobState | None, now: JobState, since: int) -> list[JobEvent]:
    here = set() if before is None else {m.pod_uid for m in before.snapshot.members.values()}
    return [
        _of(member, "Joined", f"it is a member of job {now.keys.job_name}", member.created_revision)
        for member in now.snapshot.members.values()
        if member.created_revision > since and member.pod_uid not in here
    ]


def _standing_by(before: JobState | None, now: JobState, since: int) -> list[JobEvent]:
    if before is None:
        new = [one for one in now.listing.standby if one.created_revision > since]
    else:
        waited = {one.pod_uid for one in before.listing.standby}
        new = [one for one in now.listing.standby if one.pod_uid not in waited]
    why = f"it waits for a place: {now.listing.reason}"
    return [_of(member, "Standby", why, now.revision) for member in new]


def _draining(now: JobState, since: int) -> list[JobEvent]:
    found = []
    for drain in now.snapshot.drains.values():
        if drain.created_revision > since:
            asked = drain.requested_by if drain.requested_by != drain.member else ""
            by = f" (asked for by {asked})" if asked else ""
            found.append(_drain("Draining", f"{drain.reason}{by}", drain.created_revision, drain))
        if drain.outcome == "expired" and drain.mod_revision > since:
            why = "its deadline came before all ranks had saved the same step"
            found.append(_drain("Expired", why, drain.mod_revision, drain))
        if drain.outcome == "committed" and drain.mod_revision > since:
            why = f"all ranks have saved step {drain.step}: it may go"
            one = _drain("Committed", why, drain.mod_revision, drain, of_job=False)
            found.append(one)
    return found


def _committed(now: JobState, since: int, time_to_save_s: float | None) -> list[JobEvent]:
    last = now.snapshot.last_commit
    if last is None or last.forgotten or last.mod_revision <= since:
        return []
    message = f"all ranks have saved step {last.step}"
    commit = now.snapshot.commit
    if commit is not None and time_to_save_s is not None and commit.took_s > time_to_save_s:
        message += (
            f" in {commit.took_s:.0f} s, longer than the {time_to_save_s:.0f} s that the shortest"
            " grace of a pod leaves: raise terminationGracePeriodSeconds"
        )
    return [JobEvent("Committed", message, last.mod_revision)]


def _lost(before: JobState | None, now: JobState, since: int) -> list[JobEvent]:
    if before is None:
        return [
            JobEvent(
                "Lost",
                f"{entry.member}: {entry.why}",
                entry.revision,
                str(entry.details.get("pod_uid") or ""),
                entry.member,
            )
            for entry in now.entries_after(since)
            if entry.what == "lost"
        ]
    was, job = before.snapshot, now.snapshot.job
    if was.job is None or job is None or was.job.generation != job.generation:
        return []
    here = {member.pod_uid for member in now.snapshot.members.values()}
    left = {entry.member for entry in now.entries_after(since) if entry.what == "leave"}
    return [
        _of(member, "Lost", f"{member.name}: its lease expired", now.revision)
        for member in was.members.values()
        if member.pod_uid not in here
        and member.name not in left
        and member.name not in now.snapshot.members
    ]


def _written(now: JobState, since: int) -> list[JobEvent]:
    """Return the events that only the history records, such as new worlds and failures.

    A failure's text stays in the store: Events are read by more people, and it may name data.
    """
    found = []
    for entry in now.entries_after(since):
        match entry.what:
            case "round":
                found.append(JobEvent("Reformed", _world(entry), entry.revision))
            case "failed":
                uid = str(entry.details.get("pod_uid") or "")
                found.append(JobEvent("Failed", _failed(entry), entry.revision, uid, entry.member))
            case "slow":
                found.append(JobEvent("SlowSave", entry.why, entry.revision))
            case "wait":
                found.append(JobEvent("Waiting", _wait(entry), entry.revision))
            case "quarantine":
                uid = str(entry.details.get("pod_uid") or "")
                why = f"{entry.member}: {entry.why}"
                found.append(JobEvent("Quarantined", why, entry.revision, uid, entry.member))
            case "state":
                found += _state(now.keys.job_name, entry)
    return found


def _state(job: str, entry: HistoryEntry) -> list[JobEvent]:
    state = entry.details.get("state")
    meaning = next((one for name, one in STATES.items() if name == state), None)
    if meaning is None:
        return []
    message = f"{state}: {meaning.meaning}{_causes(entry)}"
    if meaning.level != "ok":
        message += f"; muster why {job} says why, and what to do"
    return [JobEvent(meaning.event, message, entry.revision)]


def _causes(entry: HistoryEntry) -> str:
    ranks = entry.details.get("ranks")
    if not isinstance(ranks, list):
        return ""
    pairs = [one for one in ranks if isinstance(one, list) and len(one) == 2]
    named = [f"rank {rank} ({pod})" for rank, pod in pairs if isinstance(rank, int)]
    return f": the others wait for {' and '.join(named)}" if named else ""


def _failed(entry: HistoryEntry) -> str:
    details = entry.details
    rank, often = details.get("rank"), details.get("in_a_row")
    who = f"rank {rank}" if isinstance(rank, int) and rank >= 0 else "a worker"
    what = f"with {details['error']}" if details.get("error") else "without a Python error"
    row = f", {ordinal(often)} in a row" if isinstance(often, int) and often > 1 else ""
    return f"{entry.member}: {who} ended round {_round(details)} {what}{row}"


def _wait(entry: HistoryEntry) -> str:
    details = entry.details
    took_s = details.get("wait_s")
    wait_s = f"{took_s:g}" if isinstance(took_s, int | float) else "some"
    row = f"{details.get('failed_starts')} worlds in a row failed before a step was reported"
    return f"waits {wait_s} s before round {_round(details)}: {row}"


def _world(entry: HistoryEntry) -> str:
    nodes = entry.details.get("nodes")
    return f"a world of {nodes} nodes trains (round {_round(entry.details)})"


def _round(details: Mapping[str, object]) -> object:
    number = details.get("round")
    return shown_round(number) if isinstance(number, int) else number


def _of(member: Member, reason: Reason, message: str, revision: int) -> JobEvent:
    of_job = reason not in ("Joined", "Standby")
    return JobEvent(reason, message, revision, member.pod_uid, member.name, of_job)


def _drain(
    reason: Reason, why: str, revision: int, drain: Drain, *, of_job: bool = True
) -> JobEvent:
    return JobEvent(reason, f"{drain.member}: {why}", revision, drain.pod_uid, drain.member, of_job)


class EventReporter(Loop):
    """The publisher of all jobs' events; reports its progress to ``leadership`` as a revision."""

    def __init__(self, jobs: Jobs, owners: Owners, events: Events, leadership: Leadership) -> None:
        super().__init__()
        self._jobs = jobs
        self._owners = owners
        self._events = events
        self._leadership = leadership
        self._before: dict[JobKeys, JobState] = {}
        self._from = 0
        """The revision from which on this leader publishes."""

    async def run(self) -> None:
        """Publish Events until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._events.run())
            await self._jobs.changed_after(0)
            self._from = self._since()
            await super().run()

    async def step(self) -> Outlook:
        """Publish what has changed; note up to which revision that is all."""
        sequence, revision = self._jobs.sequence, self._jobs.mirror.certain_revision
        for keys in [keys for keys in self._before if not self._jobs.has(keys)]:
            del self._before[keys]
        all_told = True
        for keys, state in self._jobs.states().items():
            if self._before.get(keys) is not state:
                all_told = await self._tell_of(state, self._from) and all_told
        if all_told:
            self._leadership.progress = partial(self._told, revision)
        look_at_s = math.inf if all_told else self.clock() + OWNER_RETRY_S
        changed = partial(self._jobs.changed_after, sequence)
        return Outlook(changed, look_at_s, burst_s=GATHER_S)

    def _since(self) -> int:
        """Return the revision to publish from: the former leader's, else the current one."""
        now, told = self._jobs.mirror.certain_revision, self._leadership.told
        # A store that was restored from a backup may be behind that progress.
        return now if told is None or told > now else told

    async def _tell_of(self, state: JobState, since: int) -> bool:
        """Publish the Events of one job; return False if its owner cannot be read yet.

        If a defect occurs, only this job loses these Events.
        """
        before = self._before.get(state.keys)
        try:
            await self._tell(before, state, since)
        except ClusterUnavailable:
            return False
        except Exception as error:
            job = state.keys.job_name
            log_defect(f"cannot publish the newest Events of job {job}: {error}", error)
        self._before[state.keys] = state
        return True

    async def _tell(self, before: JobState | None, state: JobState, since: int) -> None:
        new = job_events(before, state, since, self._owners.time_to_save_s(state))
        of_job = any(one.of_job for one in new)
        owner = await self._owners.reference(state) if of_job else None
        for one in new:
            pod = self._owners.pod(state.keys, one.pod, one.pod_uid)
            if pod is not None:
                self._say(pod.reference, one)
            if owner is not None and one.of_job:
                self._say(owner, one)

    def _told(self, revision: int) -> int:
        return reported_up_to(revision, self._events.series)

    def _say(self, about: Mapping[str, Any], one: JobEvent) -> None:
        warning = one.reason in WARNINGS
        self._events.say(about, one.reason, one.message, revision=one.revision, warning=warning)
