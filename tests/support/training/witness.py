# SPDX-License-Identifier: Apache-2.0
"""What the store said about a job, all the time: its members, its nodes and its rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from launcher_shim.c10d.rounds.records import Node, Round
from rdzv.errors import RecordError, StoreAmbiguous, StoreUnavailable
from rdzv.job import JobClient
from rdzv.keys import JobKeys, last_name
from rdzv.records.drain import Commit
from rdzv.records.world import WorldChange
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue, Put, WatchEvent
from rdzv.store.access import Access
from rdzv.store.etcd.client import EtcdStore
from tests.support.training.background import Background

T = TypeVar("T")

ANSWER_TIMEOUT_S = 60.0
"""For the store to answer, on cores that are shared."""


@dataclass(frozen=True)
class Sight:
    """The store at one moment."""

    membership: Snapshot
    round: Round
    nodes: dict[str, Node]


class Witness:
    """Watches the store past every proxy, from a thread of its own."""

    def __init__(
        self, background: Background, endpoints: Access | Sequence[str], job: JobKeys
    ) -> None:
        self.rounds: list[tuple[float, int, Round]] = []
        self.commits: list[tuple[float, Commit]] = []
        self.changes: list[tuple[float, WorldChange]] = []
        self.at_change: Callable[[WorldChange], object] | None = None
        """Called with each change of a world in place as it comes, in the background."""
        self.sight = Sight(Snapshot(0), Round(), {})
        self._background = background
        self._job = job
        background.run(self._begin(endpoints))

    async def _begin(self, endpoints: Access | Sequence[str]) -> None:
        self.store = EtcdStore(endpoints)
        client = JobClient.of(self.store, self._job, clock=time.monotonic)
        self._mirror, self._membership = client.mirror, client.membership
        self._mirror.subscribe(self._take)
        self._task = asyncio.create_task(client.watching.run(), name="witness")

    def close(self) -> None:
        """Stop watching."""
        self._background.run(self._end())

    async def _end(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self.store.close()

    def kvs(self) -> dict[str, KeyValue]:
        """Every key of the job, read anew."""
        read = self._answer(lambda: self.store.range(self._job.prefix, prefix=True))
        return {kv.key: kv for kv in read.kvs}

    def put(self, key: str, value: bytes) -> int:
        """Write ``value``, maybe more than once; returns the revision."""
        return self._answer(lambda: self.store.txn([], [Put(key, value)])).revision

    def compact(self, revision: int) -> None:
        """Let the store forget the history before ``revision``."""
        self._answer(lambda: self.store.compact(revision))

    def _answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until the store has answered: the product's deadlines are too short for a drill."""

        async def insist() -> T:
            deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
            while True:
                try:
                    return await ask()
                except (StoreUnavailable, StoreAmbiguous):
                    if time.monotonic() >= deadline_s:
                        raise
                    await asyncio.sleep(0.1)

        return self._background.run(insist(), 2 * ANSWER_TIMEOUT_S)

    def _take(self, events: Sequence[WatchEvent]) -> None:
        membership = self._membership.snapshot()
        generation = membership.job.generation if membership.job else 1
        run = self._job.in_generation(generation).run(self._job.job_name)
        nodes: dict[str, Node] = {}
        current = Round()
        for key, kv in self._mirror.kvs.items():
            with suppress(RecordError):
                if key == run.round:
                    current = Round.from_kv(kv)
                elif key.startswith(run.nodes):
                    nodes[last_name(key)] = Node.from_kv(kv)
        if not self.rounds or self.rounds[-1][1:] != (generation, current):
            self.rounds.append((time.monotonic(), generation, current))
        for event in events:
            if event.kv.key == run.world and event.kind == "put":
                with suppress(RecordError):
                    self.changes.append((time.monotonic(), WorldChange.from_kv(event.kv)))
                    if self.at_change is not None:
                        self.at_change(self.changes[-1][1])
        commit = membership.commit
        if commit is not None and (not self.commits or self.commits[-1][1] != commit):
            self.commits.append((time.monotonic(), commit))
        self.sight = Sight(membership, current, nodes)
