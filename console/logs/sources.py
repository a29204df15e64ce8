# SPDX-License-Identifier: Apache-2.0
"""The sources of a job's lines in a cluster: its containers' logs, and its history in a sidecar.

A container's lines come from the API server: of its lives one after the other, none twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from console.logs.lines import Line, Source, stamped
from console.remote.pods import JobPod, job_pod
from console.remote.sidecar import FollowedCommand, ask, last_object, object_in
from controller.cluster.api import ClusterApi, Object
from controller.cluster.collection import Collection
from injection import sidecar
from rdzv.errors import ClusterRefused, ClusterUnavailable
from rdzv.records.job import HistoryEntry

State = Literal["waiting", "running", "ended"]

NOT_THERE = (400, 404)
"""Answers for a container that has not started, or whose log or pod is gone."""

OVERLAP_S = 10.0
"""Time that a log is read again from before the last line, as lines take time to come here."""

PAUSE_S, PAUSE_MOST_S = 0.5, 10.0
"""The time between two attempts to read a log, in seconds."""

TRIES = 3
"""The attempts to read a log up to now: one connection may break off."""

ANSWER_S = 30.0
"""Timeout of a question: a Python starts in a container whose processor may be throttled."""


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


@dataclass(slots=True)
class Position:
    """The end of the part of a log that has been read, by the node's clock, and the time by ours.

    ``restarts``: of the container, up to which its lives before have been read.
    """

    last_unix_ns: int = 0
    read_s: float | None = None
    restarts: int = 0

    def since_s(self, now_s: float) -> float | None:
        """Return how far back to read; None for all of it. It goes by our clock alone."""
        return None if self.read_s is None else now_s - self.read_s + OVERLAP_S


@dataclass(slots=True)
class Reader:
    """A reader of one namespace's logs. ``note`` gets a sentence on each log that cannot be read.

    ``tail``: the most lines of each container's past; None for all.
    """

    api: ClusterApi
    namespace: str
    note: Callable[[str], None]
    tail: int | None = None
    positions: dict[tuple[str, str], Position] = field(default_factory=dict)
    busy: set[tuple[str, str]] = field(default_factory=set)
    """The containers whose lines may not have all been read."""
    cut: dict[str, str] = field(default_factory=dict)
    """The reason for each pod whose past is not whole."""

    async def past(self, container: LoggedContainer) -> AsyncIterator[Line]:
        """Yield the lines up to now: of the container before its last restart, then its own."""
        began_s, position = monotonic(), self._position(container)
        if container.before:
            async for line in self._whole(container, previous=True):
                yield line
        if container.state != "waiting":
            async for line in self._whole(container, previous=False):
                yield line
        position.read_s, position.restarts = began_s, container.restarts

    async def _whole(self, container: LoggedContainer, *, previous: bool) -> AsyncIterator[Line]:
        """Yield one life's lines up to now, over a few connections; note what is missing."""
        for attempt in range(TRIES):
            try:
                async for line in self._read(container, previous=previous, tail=self.tail):
                    yield line
                return
            except ClusterUnavailable as error:
                if attempt == TRIES - 1:
                    self.cut[container.pod] = str(error)
                    return
            await asyncio.sleep(PAUSE_S * 2**attempt)

    async def follow(
        self, pods: Collection[LoggedPod], key: tuple[str, str]
    ) -> AsyncIterator[Line]:
        """Yield a container's lines from its position on, over restarts, until its pod is gone."""
        pause_s, over = PAUSE_S, -1
        while True:
            sequence, container = pods.sequence, containers_of(pods.items.values()).get(key)
            if container is None:
                self.busy.discard(key)
                return
            if container.state == "waiting" or over == container.restarts:
                self.busy.discard(key)
                await pods.changed_after(sequence)
                continue
            self.busy.add(key)
            position = self._position(container)
            before_ns = position.last_unix_ns
            if container.before and container.restarts > position.restarts:
                async for line in self._lines(container, previous=True):
                    yield line
            position.restarts = container.restarts
            async for line in self._lines(container, follow=True):
                yield line
            if container.state == "ended":
                over = container.restarts
            pause_s = PAUSE_S if position.last_unix_ns > before_ns else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MOST_S)

    def _position(self, container: LoggedContainer) -> Position:
        return self.positions.setdefault(container.key, Position())

    async def _lines(
        self, container: LoggedContainer, *, follow: bool = False, previous: bool = False
    ) -> AsyncIterator[Line]:
        """Yield the lines after the position up to where the log breaks off, and note why."""
        try:
            async for line in self._read(container, follow=follow, previous=previous):
                yield line
        except ClusterUnavailable as error:
            self.note(str(error))

    async def _read(
        self,
        container: LoggedContainer,
        *,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
    ) -> AsyncIterator[Line]:
        """Yield the lines after the position, and move it; raises ``ClusterUnavailable``."""
        position = self._position(container)
        at = last = position.last_unix_ns
        skips = last > 0
        try:
            async for text in self.api.log_lines(
                self.namespace,
                container.pod,
                container.name,
                follow=follow,
                previous=previous,
                tail=tail,
                since_s=position.since_s(monotonic()),
                timestamps=True,
            ):
                at, rest = stamped(text, at)
                # Within one life times only grow, and lines without one belong to the line before.
                skips = skips and at <= last
                if skips:
                    continue
                position.last_unix_ns, position.read_s = max(at, last), monotonic()
                yield Line(at, container.source, rest)
        except ClusterRefused as error:
            if error.status not in NOT_THERE:
                raise


def entries_in(text: str) -> list[HistoryEntry]:
    """Read the lines of ``muster history --json``; what another version writes is left out."""
    found = []
    for line in text.splitlines():
        said = object_in(line)
        if said is None:
            continue
        try:
            found.append(
                HistoryEntry(
                    said["what"],
                    str(said["member"]),
                    str(said["why"]),
                    float(said["at_unix_s"]),
                    dict(said["details"]),
                    int(said["revision"]),
                )
            )
        except (ArithmeticError, ValueError, KeyError, TypeError):
            continue
    return found


@dataclass(frozen=True, slots=True)
class Seats:
    """The ranks of each member, and the members of present worlds by round, in rank order."""

    slots: Mapping[str, int] = field(default_factory=dict)
    worlds: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def seats_in(text: str) -> Seats:
    """Read them from ``muster status --json``."""
    said = last_object(text) or {}
    try:
        return Seats(
            {str(one["name"]): int(one["slots"]) for one in said["members"]},
            {int(one["round"]): tuple(map(str, one["nodes"])) for one in said["runs"]},
        )
    except (ArithmeticError, ValueError, KeyError, TypeError):
        return Seats()


async def history_of(api: ClusterApi, pods: Sequence[JobPod]) -> list[HistoryEntry]:
    """Ask for the history; raises as ``ask`` does, and ``ClusterUnavailable`` if it fails there."""
    ran = await ask(api, pods, ["history", "--json"], timeout_s=ANSWER_S)
    if ran.status != 0:
        raise ClusterUnavailable(f"muster history in a sidecar ended with {ran.status}: {ran.err}")
    return entries_in(ran.out)


async def seats_of(api: ClusterApi, pods: Sequence[JobPod]) -> Seats:
    """Ask for the seats; raises as ``ask`` does."""
    ran = await ask(api, pods, ["status", "--json"], timeout_s=ANSWER_S)
    return seats_in(ran.out)


async def follow_history(
    api: ClusterApi,
    present: Callable[[], Sequence[JobPod]],
    took_in: Callable[[Sequence[HistoryEntry]], None],
    fail: Callable[[str], None],
) -> None:
    """Pass on the history and what is added to it, until cancelled; an entry may come again.

    ``present``: the pods that may be asked; ``fail`` gets why none says anything.
    """
    argv = ("history", "--json", "--watch")

    def took_line(line: str) -> None:
        took_in(entries_in(line))

    await FollowedCommand("muster logs", argv, present, took_line, fail).run(api)
