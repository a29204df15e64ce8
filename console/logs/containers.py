# SPDX-License-Identifier: Apache-2.0
"""The containers of a job's pods whose lines are shown, as the API server has them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from console.logs.lines import Source
from console.remote.pods import JobPod, job_pod
from controller.cluster.api import Object
from injection import sidecar

State = Literal["waiting", "running", "ended"]


@dataclass(frozen=True, slots=True)
class LoggedContainer:
    """One container. ``restarts``: how often it was started again. ``before``: one ran before it.

    ``ended_by``: the exit status and the kubelet's word for it; empty while none has ended.
    """

    pod: str
    uid: str
    name: str
    source: Source
    state: State = "waiting"
    restarts: int = 0
    before: bool = False
    ended_by: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Its identity, whichever life it is in: no two pods share a UID."""
        return self.uid, self.name


@dataclass(frozen=True, slots=True)
class LoggedPod:
    """One pod, with those of its containers that are shown."""

    pod: JobPod
    containers: tuple[LoggedContainer, ...]

    @property
    def over(self) -> bool:
        """Whether it has ended, and none of its containers will start again."""
        return self.pod.phase in ("Succeeded", "Failed")


def logged_pod(pod: Object, *, with_sidecar: bool) -> LoggedPod:
    """Reduce a pod. ``with_sidecar``: its sidecar's lines are shown, too."""
    seen, status = job_pod(pod), pod.get("status") or {}
    several = len(seen.containers) > 1
    found = [
        _container(seen, status, "containerStatuses", name, name if several else "")
        for name in seen.containers
    ]
    if with_sidecar and seen.sidecar:
        found.append(_container(seen, status, "initContainerStatuses", seen.sidecar, sidecar.NAME))
    return LoggedPod(seen, tuple(found))


def _container(pod: JobPod, status: Object, kind: str, name: str, also: str) -> LoggedContainer:
    found: Object = next((one for one in status.get(kind) or [] if one.get("name") == name), {})
    current, last = found.get("state") or {}, found.get("lastState") or {}
    state: State = "waiting"
    if current.keys() & {"running", "terminated"}:
        state = "running" if "running" in current else "ended"
    ended = current.get("terminated") or last.get("terminated") or {}
    by = f"exit {ended.get('exitCode')} ({ended.get('reason') or 'no reason'})" if ended else ""
    return LoggedContainer(
        pod.name,
        pod.uid,
        name,
        Source(pod.name, also),
        state,
        int(found.get("restartCount") or 0),
        "terminated" in last,
        by,
    )


def containers_of(pods: Iterable[LoggedPod]) -> dict[tuple[str, str], LoggedContainer]:
    """Return the containers of pods by their keys."""
    return {one.key: one for pod in pods for one in pod.containers}
