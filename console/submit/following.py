# SPDX-License-Identifier: Apache-2.0
"""Following of a submitted job to its end: its state in a sentence, and the lines of its rank 0."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import quote

from console.logs.following import JobLogs
from console.logs.printing import Pages, PrintedLine
from console.remote.pods import why_it_waits
from controller.cluster import paths
from controller.cluster.api import NOT_FOUND, ClusterApi, Object
from injection import sidecar
from launcher_shim.exit_status import EXIT_DONE, EXIT_FAULT, EXIT_TERMINATED
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable, JobNotFound
from rdzv.sentences import counted

_NO_FAILURE = (EXIT_DONE, EXIT_TERMINATED)

LOOK_S = 1.0
"""Time from one look at the job to the next."""
PODS_LOOK_S = 10.0
"""Longest time between two looks at its pods, which may be many."""
LAST_LINES_S = 5.0
"""Time for the last lines of a pod to arrive once the job has ended."""
OUTAGE_S = 600.0
"""Time without an answer of the API server after which following ends; the job may go on."""
ERROR_LINES = 400
"""Number of a failed container's last lines in which its error is looked for."""

_ERROR = re.compile(r"(?:\[[^\]]*\]:? ?)?((?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception)): .*")
_OF_LAUNCHER = "ChildFailedError"


@dataclass(frozen=True, slots=True)
class ContainerFailure:
    """A container that ended by itself with a status other than 0."""

    pod: str
    container: str
    status: int
    why: str

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why not in ("", "Error") else ""
        return f"container {self.container} of pod {self.pod} ended with {self.status}{why}"


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A sentence on a job. ``status``: its exit status once it has ended, else None."""

    sentence: str
    status: int | None = None
    failure: ContainerFailure | None = None


def progress_of(owner: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> JobProgress:
    """Return the progress of the object ``owner``, which is a Job or an MPIJob, by its pods."""
    status = owner.get("status") or {}
    true = {
        str(one.get("type")): one
        for one in status.get("conditions") or []
        if one.get("status") == "True"
    }
    if true.keys() & {"Complete", "Succeeded"}:
        return JobProgress("the job is complete", EXIT_DONE)
    if (failed := true.get("Failed")) is not None:
        failure = failure_of(pods)
        code = EXIT_FAULT if failure is None else failure.status
        why = failed.get("message") or failed.get("reason") or "no reason is given"
        return JobProgress(f"the job has failed: {why}", code, failure)
    if "SuccessCriteriaMet" in true:
        return JobProgress("training has ended; the last pods stop")
    if "FailureTarget" in true:
        return JobProgress(f"the job fails: {true['FailureTarget'].get('message')}; its pods stop")
    if (owner.get("spec") or {}).get("suspend"):
        return JobProgress("the job is suspended: its pods are made once it is resumed")
    return JobProgress(_running(owner, pods))


def _running(owner: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> str:
    there = [one for one in pods if _phase(one) in ("Pending", "Running")]
    runs = sum(_is_ready(one) for one in there)
    wanted = (owner.get("spec") or {}).get("parallelism") or len(there)
    said = f"{runs} of {counted(wanted, 'pod')} ready" if wanted else "no pod yet"
    failures = sum(_phase(one) == "Failed" and _failed_in(one) is not None for one in pods)
    if failures:
        said += f"; {counted(failures, 'pod')} failed before"
    if ended := sum(_phase(one) == "Succeeded" for one in pods):
        said += f"; {counted(ended, 'pod')} ended with {EXIT_DONE}"
    if without := without_sidecar(there):
        return f"{said}; {without} has no sidecar, and trains without Muster"
    waiting = (
        (one["metadata"]["name"], why)
        for one in there
        if (why := why_it_waits(one.get("status") or {}))
    )
    if (first := next(waiting, None)) is not None:
        said += f"; {first[0]} waits: {first[1]}"
    return said


def without_sidecar(pods: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of a pod that has no sidecar; empty if all have."""
    for one in pods:
        first = (one.get("spec") or {}).get("initContainers") or []
        if not any(each.get("name") == sidecar.NAME for each in first):
            return str(one["metadata"]["name"])
    return ""


def failure_of(pods: Sequence[Mapping[str, Any]]) -> ContainerFailure | None:
    """Return the failure that came last, of all pods; None if no container failed."""
    found = [pair for pod in pods if (pair := _failed_in(pod)) is not None]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _failed_in(pod: Mapping[str, Any]) -> tuple[str, ContainerFailure] | None:
    for one in _statuses(pod):
        for when in ("state", "lastState"):
            ended = (one.get(when) or {}).get("terminated") or {}
            code = ended.get("exitCode", EXIT_DONE)
            if one.get("name") != sidecar.NAME and code not in _NO_FAILURE:
                name = str(pod["metadata"]["name"])
                failure = ContainerFailure(
                    name, str(one["name"]), code, str(ended.get("reason") or "")
                )
                return str(ended.get("finishedAt") or ""), failure
    return None


def _statuses(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        yield from (pod.get("status") or {}).get(key) or []


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase"))


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any((one.get("type"), one.get("status")) == ("Ready", "True") for one in conditions)


@dataclass(frozen=True, slots=True)
class Followed:
    """A job to follow: the path of its object, the selector of its pods, and their container.

    ``container``: the one that trains, whose lines are shown.
    """

    name: str
    namespace: str
    path: str
    selector: str
    container: str

    @property
    def pods(self) -> str:
        """The path of its pods."""
        return f"{paths.core(self.namespace, 'pods')}?labelSelector={quote(self.selector)}"


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs: one for lines of the training, one for sentences about the job."""

    line: Callable[[str], None]
    say: Callable[[str], None]


async def follow(api: ClusterApi, job: Followed, out: Outputs) -> int:
    """Follow a job to its end, and return its exit status: 0, or that of what failed.

    Raises ``JobNotFound`` if somebody deletes it, ``ClusterUnavailable`` after ``OUTAGE_S``.
    """
    lines = asyncio.create_task(_lines(api, job, out))
    try:
        ended = await _state(api, job, out)
        await asyncio.wait([lines], timeout=LAST_LINES_S)
    finally:
        lines.cancel()
        await asyncio.wait([lines])
    if not lines.cancelled():
        lines.result()
    if ended.failure is not None:
        out.say(str(ended.failure))
        if error := await _error_of(api, job, ended.failure):
            out.say(f"its last error: {error}")
    assert ended.status is not None
    return ended.status


async def _state(api: ClusterApi, job: Followed, out: Outputs) -> JobProgress:
    """Say each change of the job's state; return the last one."""
    said, looked_s, seen = "", -PODS_LOOK_S, None
    pods: list[Object] = []
    answered_s, is_away = monotonic(), False
    while True:
        try:
            owner = await _owner(api, job)
            status, now_s = owner.get("status"), monotonic()
            if status != seen or now_s - looked_s >= PODS_LOOK_S:
                pods = (await api.get(job.pods)).get("items") or []
                looked_s, seen = now_s, status
            progress = progress_of(owner, pods)
            answered_s, is_away = now_s, False
        except ClusterUnavailable as error:
            if monotonic() - answered_s >= OUTAGE_S:
                raise ClusterUnavailable(
                    f"{error}\njob {job.name} may go on; muster get {job.name} shows it"
                ) from error
            if not is_away:
                out.say(f"{error}; trying again")
                is_away = True
            await asyncio.sleep(LOOK_S)
            continue
        if progress.sentence != said:
            said = progress.sentence
            out.say(said)
        if progress.status is not None:
            return progress
        await asyncio.sleep(LOOK_S)


async def _owner(api: ClusterApi, job: Followed) -> Object:
    try:
        return await api.get(job.path)
    except ClusterRefused as error:
        if error.status == NOT_FOUND:
            raise JobNotFound(f"job {job.name} was deleted before its end") from error
        raise


async def _lines(api: ClusterApi, job: Followed, out: Outputs) -> None:
    """Show the lines of rank 0, and of pods that have no rank, from the first container on."""
    try:
        while True:
            if await _has_begun(api, job):
                break
            await asyncio.sleep(LOOK_S)
        await JobLogs(api, job.name, Pages(), partial(_show, out), out.say).show(follow=True)
    except (ClusterError, JobNotFound) as error:
        out.say(f"no further lines are shown: {error}")


async def _has_begun(api: ClusterApi, job: Followed) -> bool:
    """Return whether a container that trains has started, so that its sidecar can be asked."""
    try:
        pods = (await api.get(job.pods)).get("items") or []
    except ClusterUnavailable:
        return False  # following of the state says so
    return any(
        one["name"] == job.container and "waiting" not in (one.get("state") or {})
        for pod in pods
        for one in (pod.get("status") or {}).get("containerStatuses") or []
    )


def _show(out: Outputs, printed: PrintedLine) -> None:
    if printed.origin is None or not printed.origin.first:
        out.line(str(printed))


async def _error_of(api: ClusterApi, job: Followed, failure: ContainerFailure) -> str:
    """Return the exception that a failed container's log ends with; empty without one."""
    last: deque[str] = deque(maxlen=ERROR_LINES)
    try:
        async for line in api.log_lines(
            job.namespace, failure.pod, failure.container, tail=ERROR_LINES
        ):
            last.append(line)
    except ClusterError:
        return ""  # the failure itself is said in any case
    return error_in(last)


def error_in(lines: Sequence[str]) -> str:
    """Return the last exception in the lines of a log that is not the launcher's own."""
    found = (match[0] for line in lines if (match := _ERROR.fullmatch(line.strip())))
    return next((line for line in reversed(list(found)) if _OF_LAUNCHER not in line), "")
