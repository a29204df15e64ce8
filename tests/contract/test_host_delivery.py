# SPDX-License-Identifier: Apache-2.0
"""The delivered host list, by a mirror that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from agent.hosts import HostDelivery
from launcher_shim.hosts import CONFIRM_S, token_of
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.reconcile import Kernel
from rdzv.records.drain import Drain
from rdzv.records.job import HistoryEntry, Incarnation, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.store import DEFAULT_TIMEOUT_S, KeyValue, RangeResult, WatchEvent
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.records import kv
from tests.support.records import member as record
from tests.support.sidecars.run_dir import MemoryRunDir
from tests.support.tasks import beside
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.virtual

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)


class Questioned(MemoryStore):
    """A store whose answers to linearizable reads are given by hand."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine())
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()
        self.revision = 0

    async def range(
        self, key: str, *, prefix: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> RangeResult:
        """Answer that nothing has happened after ``revision``."""
        self.asked.set()
        await self.answers.wait()
        return RangeResult(self.revision, ())


class Scene:
    """A sidecar's list, whose time and store are moved by hand."""

    def __init__(self, run_dir: MemoryRunDir, *, registered: bool = True) -> None:
        self.now = 100.0
        self.store = Questioned()
        client = JobClient.of(self.store, KEYS, clock=lambda: self.now)
        self.mirror = client.mirror
        self.run_dir = run_dir
        self.registered = asyncio.Event()
        if registered:
            self.registered.set()
        kernel = Kernel(client, tuple, self.registered.wait, lambda: self.now, Random(1))
        self.delivery = HostDelivery(kernel, run_dir, 1, self.registered)

    def put(self, *members: Member) -> None:
        self._apply(*(self._put(HERE.member(m.name), m.to_json()) for m in members))

    def put_over(self, before: KeyValue, member: Member) -> None:
        """Let a member come whose key is still there, as of the pod before it."""
        revision = self.mirror.revision + 1
        self._apply(
            WatchEvent("put", before._replace(value=member.to_json(), mod_revision=revision))
        )

    def register(self, member: Member) -> None:
        """Let a member come, with the record of who holds its name."""
        holder = Incarnation(member.name, member.incarnation, member.pod_uid)
        self._apply(
            self._put(KEYS.incarnation(member.name), holder.to_json()),
            self._put(HERE.member(member.name), member.to_json()),
        )

    def lose(self, member: Member) -> None:
        self._apply(self._gone(member))

    def drain_and_lose(self, member: Member) -> None:
        """Let both have happened when the mirror next hears of the store, as after a cut."""
        drain = Drain(member.pod_uid, member.name, "its node is drained", "sigterm")
        self._apply(self._put(HERE.drain(member.pod_uid), drain.to_json()), self._gone(member))

    def leave(self, *members: Member) -> None:
        """Let members leave on purpose, in one batch of the watch."""
        revision = self.mirror.revision + 1
        entries = [HistoryEntry("leave", m.name, "it was stopped", 0.0) for m in members]
        keys = [KEYS.history_entry(revision, entry.member, entry.what) for entry in entries]
        told = [self._put(key, one.to_json()) for key, one in zip(keys, entries, strict=True)]
        self._apply(*map(self._gone, members), *told)

    def begin(self, *members: Member) -> None:
        self.mirror.replace([self._job(members[0])], 1)
        self.put(*members)

    def confirm(self) -> None:
        """Let the store say that the mirror shows all there is."""
        self.store.revision = self.mirror.revision
        self.store.answers.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():  # noqa: ASYNC110 - a file gives no event
                await asyncio.sleep(0.02)

    def restore(self, *kvs: KeyValue) -> None:
        """Let the store be as it was when it held no more than the job and these."""
        self.mirror.replace([self._job(A), *kvs], max(kv.mod_revision for kv in kvs))

    def tokens(self) -> list[str]:
        """Hosts on the list."""
        return sorted(line.partition(":")[0] for line in self.run_dir.hosts().splitlines()[:-1])

    def hosts(self) -> list[str]:
        """Members on the list, by name."""
        return [token.partition(".")[0] for token in self.tokens()]

    def listed(self) -> set[str]:
        """Members that the delivery has seen there."""
        return {member.name for member in self.delivery.listing.listed}

    def _job(self, member: Member) -> KeyValue:
        job = Job(JobPolicy(member.min_workers, member.max_workers))
        return kv(KEYS.job, 1, job.to_json())

    def _apply(self, *events: WatchEvent) -> None:
        self.mirror.apply(events, self.mirror.revision + 1)

    def _put(self, key: str, value: bytes) -> WatchEvent:
        return WatchEvent("put", kv(key, self.mirror.revision + 1, value))

    def _gone(self, member: Member) -> WatchEvent:
        return WatchEvent("delete", kv(HERE.member(member.name), self.mirror.revision + 1, b""))


@asynccontextmanager
async def delivering(*members: Member, run_dir: MemoryRunDir | None = None) -> AsyncIterator[Scene]:
    """A sidecar that has delivered these; ``run_dir`` is that of one before it."""
    scene = Scene(run_dir or MemoryRunDir())
    scene.begin(*members)
    async with beside(scene.delivery.run()):
        lines = min(len(members), members[0].max_workers)
        await scene.until(lambda: len(scene.hosts()) == lines)
        yield scene


A, B, C, D = map(record, "abcd")
OLDEST, YOUNGER, SPARE = (
    replace(member, incarnation=age, max_workers=2) for age, member in enumerate((A, B, C), 1)
)
"""Of a job that has room for two of them."""


@pytest.mark.parametrize("returned", [True, False])
async def test_i4_one_that_was_missed_stays_if_it_is_back_though_unread(*, returned: bool) -> None:
    """The coming of c is read when b may have been back for long, unread."""
    async with delivering(A, B) as scene:
        scene.lose(B)
        await scene.until(lambda: "b" not in scene.listed())
        scene.now += CONFIRM_S / 2
        scene.mirror.apply([], scene.mirror.revision + 1)
        scene.now += CONFIRM_S / 2 + 0.1
        scene.put(C)
        async with asyncio.timeout(DEADLINE_S):
            await scene.store.asked.wait()
        await scene.until(lambda: scene.hosts() == ["a", "b", "c"])
        if returned:
            scene.put(B)
        scene.confirm()
        scene.put(D)
        await scene.until(lambda: scene.hosts() == [*(["a", "b"] if returned else "a"), "c", "d"])


async def test_the_history_is_read_once_however_many_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with delivering(A, B, C, D) as scene:
        reads = []
        under = scene.mirror.under

        def counted(prefix: str) -> list[KeyValue]:
            reads.append(prefix)
            return under(prefix)

        monkeypatch.setattr(scene.mirror, "under", counted)
        scene.leave(B, C, D)
        await scene.until(lambda: scene.hosts() == ["a"])
        assert reads == [KEYS.history]


async def test_i4_a_sidecar_that_starts_again_takes_no_line_for_one_that_filled_in() -> None:
    async with delivering(OLDEST, YOUNGER) as scene:
        scene.put(SPARE)
        await scene.until(lambda: scene.listed() == {"a", "b"})
        scene.lose(YOUNGER)
        await scene.until(lambda: scene.hosts() == ["a", "b", "c"])
    scene = Scene(scene.run_dir)
    # The one that has filled in is away itself when the next sidecar reads three lines for two.
    scene.begin(OLDEST, YOUNGER)
    async with beside(scene.delivery.run()):
        await scene.until(lambda: scene.listed() == {"a", "b"})
        assert scene.hosts() == ["a", "b", "c"]
        scene.put(replace(SPARE, incarnation=9, since=3))
        await scene.until(lambda: len(scene.hosts()) == 2)
        assert scene.hosts() == ["a", "b"]


async def test_a_new_pod_has_no_claim_to_the_line_of_the_one_before_it() -> None:
    async with delivering(OLDEST, YOUNGER) as scene:
        scene.put(SPARE, replace(OLDEST, pod_uid="uid-a-2", incarnation=9))
        await scene.until(lambda: scene.hosts() == ["b", "c"])


@pytest.mark.parametrize("over", [False, True], ids=["once it had gone", "over its record"])
async def test_i4_a_pod_that_drained_before_a_backup_takes_no_host_of_its_name_off_the_list(
    *, over: bool
) -> None:
    """The present pod came once the record of the one before had lapsed, or before it had."""
    async with delivering(A) as scene:
        before = scene.mirror.kvs[HERE.member("a")]
        next_pod = replace(A, pod_uid="uid-a2")
        if over:
            scene.put_over(before, next_pod)
        else:
            scene.lose(A)
            scene.put(next_pod)
        token = token_of("a", "uid-a2")
        await scene.until(lambda: scene.tokens() == [token])
        drain = Drain(A.pod_uid, "a", "its node is drained", "sigterm")
        scene.restore(before, kv(HERE.drain(A.pod_uid), 2, drain.to_json()))
        await scene.until(lambda: scene.listed() == set())
        scene.put(B)
        await scene.until(lambda: scene.hosts() == ["a", "b"])
        assert token in scene.tokens()


async def test_i2_only_who_drains_or_leaves_goes_from_the_list_of_one_that_cannot_register() -> (
    None
):
    """A leave from before a pod registered is none of that registration."""
    async with delivering(A, B, C) as scene:
        scene.leave(B)
        await scene.until(lambda: scene.hosts() == ["a", "c"])
        scene.register(B)
        await scene.until(lambda: scene.hosts() == ["a", "b", "c"])
        kvs, revision = list(scene.mirror.kvs.values()), scene.mirror.revision
    again = Scene(scene.run_dir, registered=False)
    async with beside(again.delivery.run()):
        again.mirror.replace(kvs, revision)
        again.lose(B)
        again.put(D)
        again.leave(C)
        await again.until(lambda: again.hosts() == ["a", "b"])
        again.drain_and_lose(A)
        await again.until(lambda: again.hosts() == ["b"])
        assert not again.delivery.delivered.is_set()
        again.registered.set()
        await again.until(again.delivery.delivered.is_set)
        assert again.hosts() == ["b", "d"]
