# SPDX-License-Identifier: Apache-2.0
"""The state of a submitted job by what the API server shows: a sentence, and its end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from console.remote.pods import why_it_waits
from injection import sidecar
from launcher_shim.exit_status import EXIT_DONE, EXIT_FAULT, EXIT_TERMINATED
from rdzv.sentences import counted

_NO_FAILURE = (EXIT_DONE, EXIT_TERMINATED)


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
