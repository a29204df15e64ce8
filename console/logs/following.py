# SPDX-License-Identifier: Apache-2.0
"""The lines of all pods of a job: past ones in the order of their times, then as they come."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import monotonic
from typing import Generic, TypeVar
from urllib.parse import quote

from console.logs.lines import Line
from console.logs.printing import Pages, PrintedLine
from console.logs.sources import (
    LoggedPod,
    Reader,
    Seats,
    containers_of,
    follow_history,
    history_of,
    logged_pod,
    seats_of,
)
from console.remote.passing import no_job
from console.remote.pods import JobPod, with_right
from console.remote.sidecar import able
from controller.cluster import paths
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from injection.kinds import job_label
from injection.settings import LABEL
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable
from rdzv.reconcile import errors_in
from rdzv.records.job import HistoryEntry

T = TypeVar("T")

HOLD_S = 0.5
"""Time for which an item waits for an earlier one of another source. Longer: a follower lags.
Shorter: lines of a slow connection come after later ones of others."""

BUDGET_BYTES = 16 * 2**20
"""Memory for items that wait, of all sources together; each may hold one item beyond its part."""

GONE_S = 5.0
"""Time for which the last lines of a pod that is gone may still come."""

OVER_S = 10.0
"""Time after the end of all pods in which another one may take the place of one that failed."""

SLOTS_AGAIN_S = 10.0
"""Time after which a torchrun of a new world has started its workers, and their number is known."""

TURN = 100
"""The most lines to print before other tasks have a turn."""


@dataclass(slots=True)
class _Queue(Generic[T]):
    """One source."""

    items: deque[tuple[int, float, int, T]] = field(default_factory=deque)
    """Time of the item, time of its arrival, bytes, the item."""
    size: int = 0
    open: bool = True


class Merge(Generic[T]):
    """A merge of sources, each of which is in order of time.

    The earliest item is due when every other source has one, too, has ended, or has been empty for
    ``hold_s``, or when the item itself has waited that long.
    """

    def __init__(self, hold_s: float = HOLD_S, budget_bytes: int = BUDGET_BYTES) -> None:
        self._hold_s = hold_s
        self._budget_bytes = budget_bytes
        self._queues: dict[int, _Queue[T]] = {}
        self._heads: list[tuple[int, int, int]] = []
        self._empty: dict[int, float] = {}
        """Open sources without an item, with the time since when; the last one is the newest."""
        self._next, self._order = 0, 0

    def open(self, now_s: float) -> int:
        """Add a source; return its number."""
        self._next += 1
        self._queues[self._next] = _Queue()
        self._empty[self._next] = now_s
        return self._next

    def has_room(self, source: int) -> bool:
        """Return whether the source may put another item."""
        queue = self._queues[source]
        return not queue.items or queue.size < self._budget_bytes / len(self._queues)

    def put(self, source: int, at_unix_ns: int, item: T, size: int, now_s: float) -> None:
        """Take in an item of ``size`` bytes that was written at ``at_unix_ns``."""
        queue = self._queues[source]
        queue.items.append((at_unix_ns, now_s, size, item))
        queue.size += size
        if len(queue.items) == 1:
            self._empty.pop(source, None)
            self._push(source, at_unix_ns)

    def close(self, source: int) -> None:
        """Note that a source has ended; what it has put stays."""
        self._empty.pop(source, None)
        queue = self._queues[source]
        queue.open = False
        if not queue.items:
            del self._queues[source]

    def take(self, now_s: float) -> T | None:
        """Return the next item that is due; None if none is."""
        if self.due_s() > now_s:
            return None
        _, _, source = heappop(self._heads)
        queue = self._queues[source]
        _, _, size, item = queue.items.popleft()
        queue.size -= size
        if queue.items:
            self._push(source, queue.items[0][0])
        elif queue.open:
            self._empty[source] = now_s
        else:
            del self._queues[source]
        return item

    def due_s(self) -> float:
        """Return the time at which the next item is due; infinity if there is none."""
        if not self._heads:
            return math.inf
        if not self._empty:
            return -math.inf
        _, arrived_s, _, _ = self._queues[self._heads[0][2]].items[0]
        newest_s = next(reversed(self._empty.values()))
        return min(arrived_s, newest_s) + self._hold_s

    def _push(self, source: int, at_unix_ns: int) -> None:
        self._order += 1
        heappush(self._heads, (at_unix_ns, self._order, source))


Print = Callable[[PrintedLine], None]


@dataclass(slots=True)
class JobLogs:
    """The logs of one job. ``note`` gets sentences for the user, each once."""

    api: ClusterApi
    job: str
    pages: Pages
    print: Print
    note: Callable[[str], None]
    tail: int | None = None
    with_sidecar: bool = False
    _merge: Merge[Line] = field(default_factory=Merge)
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _has_room: asyncio.Event = field(default_factory=asyncio.Event)
    _known_s: float = -math.inf
    """The time at which the newest world became known."""
    _seating: asyncio.Task[None] | None = None

    async def show(self, *, follow: bool) -> None:
        """Print the lines up to now, and then, with ``follow``, those that come, to the job's end.

        Raises ``JobNotFound`` if it has no pods, ``ClusterRefused`` if its logs may not be read,
        and ``ClusterUnavailable``, after the lines that it has, if the past is not whole.
        """
        selector = quote(f"{LABEL}={job_label(self.job)}")
        path = f"{paths.core(self.api.namespace, 'pods')}?labelSelector={selector}"
        namespace = self.api.namespace
        with with_right("muster logs", "list pods", namespace):
            listed = await self.api.get(f"{path}&limit=1")  # a refusal is not to be tried again
            if not listed.get("items"):
                raise await no_job(self.api, self.job)

        def reduced(pod: dict[str, object]) -> LoggedPod:
            return logged_pod(pod, with_sidecar=self.with_sidecar)

        try:
            async with Collection(self.api, path, reduced).following() as pods:
                await pods.changed_after(0)
                await self._show(pods, follow=follow)
        except BaseExceptionGroup as group:
            with with_right("muster logs", "get pods/log", namespace):
                raise next(errors_in(group)) from group

    async def _show(self, pods: Collection[LoggedPod], *, follow: bool) -> None:
        reader = Reader(self.api, self.api.namespace, self.note, self.tail)
        knows = await self._ask(pods)
        self.pages.begin()
        found = containers_of(pods.items.values()).values()
        async for line in in_order([reader.past(one) for one in found]):
            self._print(line)
        if not follow:
            for one in self.pages.rest():
                self.print(one)
            made = {one.name: one.created_unix_s for one in _pods_in(pods)}
            for sentence in self.pages.gone(made):
                self.note(sentence)
            if reader.cut:
                names, why = ", ".join(reader.cut), next(iter(reader.cut.values()))
                raise ClusterUnavailable(f"lines of {names} are missing: {why}")
            return
        for why in reader.cut.values():
            self.note(f"earlier lines are missing: {why}")
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._follow(pods, reader), name="containers")]
            running.append(tasks.create_task(self._print_due(), name="lines"))
            if knows:
                running.append(tasks.create_task(self._follow_worlds(pods, tasks), name="worlds"))
            await self._until_over(pods, reader)
            for task in (*running, self._seating):
                if task is not None:
                    task.cancel()

    async def _ask(self, pods: Collection[LoggedPod]) -> bool:
        """Ask for the worlds up to now; return whether they can be asked for."""
        present = _pods_in(pods)
        try:
            asked = history_of(self.api, present), seats_of(self.api, present)
            history, seats = await asyncio.gather(*asked)
        except ClusterError as error:
            self.note(f"ranks and worlds are not known, lines are by pod: {error}")
            return not isinstance(error, ClusterRefused)
        self.pages.take_in(history)
        self._take(seats)
        return True

    async def _follow_worlds(self, pods: Collection[LoggedPod], tasks: asyncio.TaskGroup) -> None:
        def take_in(entries: Sequence[HistoryEntry]) -> None:
            if self.pages.take_in(entries):
                self._known_s = monotonic()
                if self._seating is not None:
                    self._seating.cancel()
                self._seating = tasks.create_task(self._seat(pods), name="slots")

        def fail(why: str) -> None:
            if able(_pods_in(pods)):  # without any, the job starts or ends
                self.note(f"worlds that come are not known: {why}")

        await follow_history(self.api, lambda: _pods_in(pods), take_in, fail)

    async def _seat(self, pods: Collection[LoggedPod]) -> None:
        """Ask for the slots of a new world's members: now, and once its workers have started."""
        for pause_s in (0.0, SLOTS_AGAIN_S):
            await asyncio.sleep(pause_s)
            with suppress(ClusterUnavailable):  # what was known before is most probably right
                self._take(await seats_of(self.api, _pods_in(pods)))

    def _take(self, seats: Seats) -> None:
        self.pages.seat(seats.slots, seats.worlds)

    async def _follow(self, pods: Collection[LoggedPod], reader: Reader) -> None:
        """Follow each container, from when it is there until its pod is gone."""
        tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                sequence, present = pods.sequence, containers_of(pods.items.values())
                for key in present.keys() - tasks.keys():
                    name = f"log of {present[key].pod}"
                    tasks[key] = group.create_task(self._pump(pods, reader, key), name=name)
                for key in tasks.keys() - present.keys():
                    # Its connection may hang with its node.
                    asyncio.get_running_loop().call_later(GONE_S, tasks.pop(key).cancel)
                await pods.changed_after(sequence)

    async def _pump(
        self, pods: Collection[LoggedPod], reader: Reader, key: tuple[str, str]
    ) -> None:
        source = self._merge.open(monotonic())
        try:
            async for line in reader.follow(pods, key):
                while not self._merge.has_room(source):
                    self._has_room.clear()
                    await self._has_room.wait()
                size = len(line.text)
                self._merge.put(source, line.at_unix_ns, line, size, monotonic())
                self._woken.set()
        finally:
            self._merge.close(source)
            self._woken.set()

    async def _print_due(self) -> None:
        """Print lines as they become due, and a new world even if it says nothing."""
        printed = 0
        while True:
            self._woken.clear()
            now_s = monotonic()
            while (line := self._merge.take(now_s)) is not None:
                self._print(line)
                printed += 1
                if printed % TURN == 0:
                    self._has_room.set()
                    await asyncio.sleep(0)
            self._has_room.set()
            due_s = self._merge.due_s()
            if math.isinf(due_s) and now_s >= self._known_s + 2 * HOLD_S:
                for one in self.pages.rest():
                    self.print(one)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(due_s - now_s, HOLD_S))):
                    await self._woken.wait()

    def _print(self, line: Line) -> None:
        for one in self.pages.print(line):
            self.print(one)

    async def _until_over(self, pods: Collection[LoggedPod], reader: Reader) -> None:
        """Wait until every pod has ended, no other has come for ``OVER_S``, and all is printed."""
        while True:
            sequence = pods.sequence
            over = all(one.over for one in pods.items.values())
            ended = bool(self.pages.worlds) and self.pages.worlds[-1].closed
            if not pods.items and not ended:
                self.note(f"job {self.job} has no pods now: waiting for some")
                over = False
            try:
                async with asyncio.timeout(OVER_S if over else None):
                    await pods.changed_after(sequence)
            except TimeoutError:
                if not reader.busy and math.isinf(self._merge.due_s()):
                    return


async def in_order(sources: Sequence[AsyncIterator[Line]]) -> AsyncIterator[Line]:
    """Yield the lines of all sources, the earliest first; one line of each is held at a time."""
    firsts = await asyncio.gather(*(anext(source, None) for source in sources))
    heads: list[tuple[int, int, Line]] = []
    for number, first in enumerate(firsts):
        if first is not None:
            heappush(heads, (first.at_unix_ns, number, first))
    while heads:
        _, number, line = heappop(heads)
        yield line
        following = await anext(sources[number], None)
        if following is not None:
            heappush(heads, (following.at_unix_ns, number, following))


def _pods_in(pods: Collection[LoggedPod]) -> list[JobPod]:
    return [one.pod for one in pods.items.values()]
