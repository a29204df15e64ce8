# SPDX-License-Identifier: Apache-2.0
"""The lines of one container, from the API server: of its lives one after the other, none twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import monotonic

from console.logs.containers import LoggedContainer, LoggedPod, containers_of
from console.logs.lines import Line, stamped
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from rdzv.errors import ClusterRefused, ClusterUnavailable

NOT_THERE = (400, 404)
"""Answers for a container that has not started, or whose log or pod is gone."""

OVERLAP_S = 10.0
"""Time that a log is read again from before the last line, as lines take time to come here."""

PAUSE_S, PAUSE_MOST_S = 0.5, 10.0
"""The time between two attempts to read a log, in seconds."""

TRIES = 3
"""The attempts to read a log up to now: one connection may break off."""


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
