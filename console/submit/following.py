# SPDX-License-Identifier: Apache-2.0
"""Following of a submitted job to its end: its state, and the lines of one pod that trains."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import quote

from console.submit.progress import ContainerFailure, JobProgress, progress_of
from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable, JobNotFound

LOOK_S = 1.0
"""Time from one look at the job to the next."""
PODS_LOOK_S = 10.0
"""Longest time between two looks at its pods, which may be many."""
LAST_LINES_S = 10.0
"""Time for the last lines of a pod to arrive once the job has ended."""
OUTAGE_S = 600.0
"""Time without an answer of the API server after which following ends; the job may go on."""
ERROR_LINES = 400
"""Number of a failed container's last lines in which its error is looked for."""

_GONE, _FORBIDDEN = 404, 403
_ERROR = re.compile(r"(?:\[[^\]]*\]:? ?)?((?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception)): .*")
_OF_LAUNCHER = "ChildFailedError"


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
    is_over = asyncio.Event()
    lines = asyncio.create_task(_lines(api, job, out, is_over))
    try:
        ended = await _state(api, job, out)
        is_over.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_LINES_S):
                await asyncio.shield(lines)
    finally:
        lines.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await lines
    if ended.failure is not None:
        out.say(str(ended.failure))
        if error := await _error_of(api, job, ended.failure):
            out.say(f"its last error: {error}")
    assert ended.status is not None
    return ended.status


async def _state(api: ClusterApi, job: Followed, out: Outputs) -> JobProgress:
    """Say each change of the job's state; return the last one."""
    told, looked_s, seen = "", -PODS_LOOK_S, None
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
        if progress.sentence != told:
            told = progress.sentence
            out.say(told)
        if progress.status is not None:
            return progress
        await asyncio.sleep(LOOK_S)


async def _owner(api: ClusterApi, job: Followed) -> Object:
    try:
        return await api.get(job.path)
    except ClusterRefused as error:
        if error.status == _GONE:
            raise JobNotFound(f"job {job.name} was deleted before its end") from error
        raise


async def _lines(api: ClusterApi, job: Followed, out: Outputs, is_over: asyncio.Event) -> None:
    """Show the lines of the pod with the lowest index; of the next one when that has ended."""
    done: set[str] = set()
    shown, heard_s = "", 0.0
    while not (done and is_over.is_set()):
        try:
            pods = (await api.get(job.pods)).get("items") or []
            left = [pod for pod in pods if pod["metadata"]["uid"] not in done]
            pod = min((one for one in left if _state_of(one, job)), key=_index, default=None)
            if pod is not None:
                name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
                since_s = monotonic() - heard_s if uid == shown else None
                if shown not in ("", uid):
                    out.say(f"the lines of pod {name} follow")
                shown, heard_s = uid, monotonic()
                async for line in api.log_lines(
                    job.namespace, name, job.container, follow=True, since_s=since_s
                ):
                    heard_s = monotonic()
                    out.line(line)
                # A log may also end while its container runs, as when it is rotated.
                if _state_of(await api.get(_path(job, name)), job) == "terminated":
                    done.add(uid)
                    continue
        except ClusterRefused as error:
            if error.status == _FORBIDDEN:
                out.say(f"no lines are shown: {error}")
                return
            if error.status == _GONE:
                done.add(shown)
        except ClusterUnavailable:
            pass  # the state of the job is followed, too, and says so
        await asyncio.sleep(LOOK_S)


def _path(job: Followed, pod: str) -> str:
    return paths.core(job.namespace, "pods", pod)


def _state_of(pod: Mapping[str, Any], job: Followed) -> str:
    """Return whether the container that trains is running or terminated; empty before that."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    state = next((one.get("state") or {} for one in statuses if one["name"] == job.container), {})
    return next((word for word in ("running", "terminated") if word in state), "")


def _index(pod: Mapping[str, Any]) -> tuple[int, str]:
    metadata = pod["metadata"]
    text = (metadata.get("labels") or {}).get("batch.kubernetes.io/job-completion-index", "0")
    return int(text) if str(text).isdigit() else 0, metadata["name"]


async def _error_of(api: ClusterApi, job: Followed, failure: ContainerFailure) -> str:
    """Return the exception that a failed container's log ends with; empty without one."""
    last: deque[str] = deque(maxlen=ERROR_LINES)
    with contextlib.suppress(ClusterError):
        async for line in api.log_lines(
            job.namespace, failure.pod, failure.container, tail=ERROR_LINES
        ):
            last.append(line)
    return error_in(last)


def error_in(lines: Sequence[str]) -> str:
    """Return the last exception in the lines of a log that is not the launcher's own."""
    found = (match[0] for line in lines if (match := _ERROR.fullmatch(line.strip())))
    return next((line for line in reversed(list(found)) if _OF_LAUNCHER not in line), "")
