# SPDX-License-Identifier: Apache-2.0
"""A mirror beside a store that is silent, refuses, or tells it what is not so.

What a store that does not answer is told of in the log, once, and one that does so again. And a
server that tells a watch that all has been sent while events are on their way: etcd does so up to
3.4.24 and 3.5.7 (etcd#15220), in an answer to a request for progress. And the first read of a job,
over a line that cannot carry all of it within one attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from random import Random

import pytest

from rdzv.errors import Compacted, StoreRefused, StoreUnavailable
from rdzv.job import Watching
from rdzv.mirror import Mirror
from rdzv.pacing import Doubling
from rdzv.store import DEFAULT_TIMEOUT_S, Page, Put, Store, WatchBatch, WatchEvent
from rdzv.store import etcd_pb2 as pb
from rdzv.store.access import Access
from rdzv.store.etcd.answers import StatusCode, StatusError
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.memory.client import Faults, MemoryEngine, MemoryStore
from rdzv.store.memory.server import EmbeddedServer, _Stream
from rdzv.store.memory.server_calls import ServedCalls
from tests.support.clocks.virtual import now
from tests.support.sidecars.processes import until
from tests.support.store.backend import DRIVERS
from tests.support.store.cut import Cut
from tests.support.store.tcp_proxy import TcpProxy
from tests.support.tasks import beside

AWAY = "the store does not answer, the last snapshot stays in force: "
REFUSES = "the store refuses, the last snapshot stays in force: "
BACK = "the store answers again"
FALSE, TRUE = "3.5.7", "3.5.8"
"""Versions of etcd whose word about progress is not to be relied on, and is."""


class Hasty:
    """One server's watch streams. Once, it keeps events back until it has told of progress past
    them, and then may end the stream before it sends them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keeping_back = False
        self.ending = False
        self._began = asyncio.Event()
        self._streams: list[_Stream] = []
        responses, create = _Stream.responses, _Stream._create

        def hasty(stream: _Stream) -> Iterator[pb.WatchResponse]:
            if self.keeping_back and stream._watchers:
                if not stream._progress_wanted:
                    return
                self.keeping_back = stream._progress_wanted = False
                yield pb.WatchResponse(header=stream._header(), watch_id=-1)
                if self.ending:
                    stream.end()
                    return
            yield from responses(stream)

        def begin(stream: _Stream, request: pb.WatchCreateRequest) -> None:
            create(stream, request)
            self._began.set()
            self._streams.append(stream)

        monkeypatch.setattr(_Stream, "responses", hasty)
        monkeypatch.setattr(_Stream, "_create", begin)
        monkeypatch.setattr("rdzv.store.etcd.watch.ASK_S", 0.05)
        self._monkeypatch = monkeypatch

    def be(self, version: str) -> None:
        """Give this for the server's version."""
        self._monkeypatch.setattr("rdzv.store.memory.server_calls.VERSION", version)

    async def end_stream(self) -> None:
        """End the streams there are, and wait until the client has opened another one."""
        self._began.clear()
        while self._streams:
            self._streams.pop().end()
        await self._began.wait()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Hasty:
    hasty = Hasty(monkeypatch)
    hasty.be(FALSE)
    return hasty


@pytest.fixture
async def server(hasty: Hasty) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as server:
        yield server


@pytest.fixture(params=DRIVERS)
async def store(request: pytest.FixtureRequest, server: EmbeddedServer) -> AsyncIterator[Store]:
    store = DRIVERS[request.param](Access((server.endpoint,)))
    yield store
    await store.close()


@asynccontextmanager
async def mirrored(store: Store) -> AsyncIterator[Mirror]:
    mirror = Mirror("/team/", now)
    async with beside(Watching(store, mirror).run()), asyncio.timeout(150):
        await mirror.changed_after(0)
        yield mirror


async def collect(batches: AsyncIterator[WatchBatch], told: list[WatchEvent]) -> None:
    async for batch in batches:
        told += batch.events


async def shown(mirror: Mirror, key: str) -> None:
    while key not in mirror.kvs:
        await mirror.changed_after(mirror.sequence)


@pytest.mark.parametrize("ending", [False, True], ids=["late", "after another stream"])
async def test_events_that_were_told_to_have_been_sent_are_not_dropped(
    hasty: Hasty, server: EmbeddedServer, store: Store, ending: bool
) -> None:
    direct = MemoryStore(server.engine)
    told: list[WatchEvent] = []
    start = (await direct.txn([], [Put("/team/a", b"")])).revision
    async with asyncio.timeout(150), aclosing(store.watch("/team/", start + 1)) as batches:
        await anext(batches)
        await direct.txn([], [Put("/team/b", b"")])
        while not told:
            told += (await anext(batches)).events
        hasty.keeping_back, hasty.ending = True, ending
        late = (await direct.txn([], [Put("/team/late", b"")])).revision
        with pytest.raises(Compacted, match="after the server had reported progress") as gone:
            await collect(batches, told)
    assert gone.value.compact_revision == late
    assert [event.kv.key for event in told] == ["/team/b"]


@pytest.mark.parametrize(
    "code",
    [StatusCode.UNAVAILABLE, StatusCode.UNKNOWN, StatusCode.PERMISSION_DENIED],
    ids=lambda code: code.name,
)
async def test_a_store_that_does_not_tell_its_version_is_followed_all_the_same(
    hasty: Hasty, monkeypatch: pytest.MonkeyPatch, code: StatusCode
) -> None:
    """As behind a proxy that lets through no more than a job's calls."""

    def refused(calls: ServedCalls, request: pb.StatusRequest) -> None:
        raise StatusError(code, "planted")

    monkeypatch.setattr(ServedCalls, "status", refused)
    async with asyncio.timeout(150), EmbeddedServer() as server:
        store, direct = EtcdStore((server.endpoint,)), MemoryStore(server.engine)
        try:
            start = (await direct.txn([], [Put("/team/a", b"")])).revision
            async with aclosing(store.watch("/team/", start)) as batches:
                assert [event.kv.key for event in (await anext(batches)).events] == ["/team/a"]
        finally:
            await store.close()


async def quiet_for_long(server: EmbeddedServer, mirror: Mirror) -> None:
    """Only others write, the watch is told of it, and all of that is compacted."""
    direct = MemoryStore(server.engine)
    for _ in range(3):
        elsewhere = (await direct.txn([], [Put("/others/a", b"")])).revision
    await mirror.reached(elsewhere)
    await direct.compact(elsewhere)


@pytest.mark.parametrize(
    ("version", "relists"), [(TRUE, 1), (FALSE, 2)], ids=["true word", "false word"]
)
async def test_a_quiet_job_is_read_anew_at_most_once_after_a_compaction(
    hasty: Hasty, server: EmbeddedServer, store: Store, version: str, relists: int
) -> None:
    """Where the word can be relied on it is resumed behind the compaction, and never read anew."""
    hasty.be(version)
    direct = MemoryStore(server.engine)
    await direct.txn([], [Put("/team/a", b"")])
    async with mirrored(store) as mirror:
        await quiet_for_long(server, mirror)
        await hasty.end_stream()
        await mirror.reached((await direct.txn([], [Put("/team/b", b"")])).revision)
        assert mirror.relists == relists
        for turn in range(3):
            await hasty.end_stream()
            await direct.txn([], [Put(f"/team/{turn}", b"")])
            await shown(mirror, f"/team/{turn}")
        assert mirror.relists == relists


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What the watching has said, with its level."""
    records = [record for record in caplog.records if record.name == "rdzv.job"]
    return [(record.levelname, record.getMessage()) for record in records]


async def until_said(caplog: pytest.LogCaptureFixture, beginning: str) -> None:
    await until(lambda: any(sentence.startswith(beginning) for _, sentence in said(caplog)))


def check_one_outage(caplog: pytest.LogCaptureFixture, away: str = AWAY) -> None:
    (first, away_sentence), (second, back) = said(caplog)
    assert (first, second, back) == ("WARNING", "INFO", BACK)
    assert away_sentence.startswith(away)


@pytest.mark.virtual
async def test_a_watch_that_is_silent_is_told_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cut = Cut()
    async with mirrored(MemoryStore(MemoryEngine(now), faults=cut)) as mirror:
        cut.cut()
        await until_said(caplog, AWAY)
        assert not mirror.healthy(now())
        cut.mend()
        await until_said(caplog, BACK)
        assert mirror.healthy(now())
    check_one_outage(caplog)


class Unreadable(Faults):
    """Fails each read, after the watch has failed."""

    def __init__(self) -> None:
        self.error: StoreRefused | StoreUnavailable | None = None
        self.failed = 0

    async def before(self, call: str) -> None:
        await self.delivering()

    async def delivering(self) -> None:
        if self.error is not None:
            self.failed += 1
            error = type(self.error)(f"{self.error} ({self.failed} times)")
            raise error


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("error", "away"), [(StoreRefused("no right"), REFUSES), (StoreUnavailable("no way"), AWAY)]
)
async def test_a_store_that_cannot_be_read_anew_is_told_once(
    caplog: pytest.LogCaptureFixture, error: StoreRefused | StoreUnavailable, away: str
) -> None:
    caplog.set_level(logging.INFO)
    faults = Unreadable()
    async with mirrored(MemoryStore(MemoryEngine(now), faults=faults)) as mirror:
        faults.error = error
        await until_said(caplog, away)
        failed = faults.failed

        await until(lambda: faults.failed > failed + 2 and not mirror.healthy(now()))
        faults.error = None
        await until_said(caplog, BACK)
    check_one_outage(caplog, away)


@pytest.mark.virtual
async def test_a_reader_that_waits_for_a_revision_ends_the_rest() -> None:
    mirror = Mirror("/team/", now)
    begun_s = now()
    resting = asyncio.create_task(mirror.waited_for(3600.0))
    await asyncio.sleep(1.0)
    reader = asyncio.create_task(mirror.reached(7))
    await resting
    await mirror.waited_for(3600.0)
    assert now() - begun_s == 1.0
    mirror.apply([], 7)
    await reader
    await mirror.waited_for(3600.0)
    assert now() - begun_s == 3601.0


# -- the first read

PREFIX = "/team/"
KEYS = 1200
VALUE = b"v" * 450


async def fill(engine: MemoryEngine) -> None:
    store = MemoryStore(engine)
    for first in range(0, KEYS, 100):
        puts = [Put(f"{PREFIX}{number:05}", VALUE) for number in range(first, first + 100)]
        await store.txn([], puts)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_job_is_read_over_a_line_that_is_too_slow_for_one_answer(driver: str) -> None:
    async with EmbeddedServer() as server:
        await fill(server.engine)
        async with TcpProxy(server.endpoint) as line:
            line.bytes_per_s = 150_000
            store = DRIVERS[driver](Access((line.endpoint,)))
            try:
                async with mirrored(store) as mirror:
                    assert len(mirror.kvs) == KEYS
            finally:
                await store.close()


class SmallAnswers(MemoryStore):
    """Gives only small pages in time, and none at first; the second waits for ``meanwhile``."""

    def __init__(
        self,
        engine: MemoryEngine,
        most: int,
        meanwhile: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(engine)
        self.asked: list[tuple[int, str]] = []
        self._most = most
        self._meanwhile = meanwhile

    async def page(
        self,
        prefix: str,
        *,
        limit: int,
        after: str = "",
        revision: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Page:
        if after and len(self.asked) == 1 and self._meanwhile is not None:
            await self._meanwhile()
        self.asked.append((limit, after))
        if limit > self._most:
            # As if the whole time had passed.
            await asyncio.sleep(timeout_s / 2)
            raise StoreUnavailable("no answer within its time")
        return await super().page(
            prefix, limit=limit, after=after, revision=revision, timeout_s=timeout_s
        )


@pytest.mark.virtual
async def test_what_has_been_read_is_not_read_again() -> None:
    engine = MemoryEngine(now)
    await fill(engine)
    store, mirror = SmallAnswers(engine, most=300), Mirror(PREFIX, now)
    watching = Watching(store, mirror, random=Random(1), pause=Doubling(0.01, 0.02))
    async with beside(watching.run()), asyncio.timeout(150):
        await mirror.changed_after(0)
    assert len(mirror.kvs) == KEYS
    assert max(limit for limit, _ in store.asked) > 300
    begun = [after for limit, after in store.asked if limit <= 300]
    assert begun == sorted(set(begun))


@pytest.mark.virtual
async def test_a_read_whose_revision_was_compacted_meanwhile_is_begun_anew() -> None:
    engine = MemoryEngine(now)
    await fill(engine)
    other = MemoryStore(engine)

    async def compact() -> None:
        await other.compact((await other.txn([], [Put(PREFIX + "00000", b"")])).revision)

    store, mirror = SmallAnswers(engine, most=KEYS, meanwhile=compact), Mirror(PREFIX, now)
    watching = Watching(store, mirror, pause=Doubling(0.01, 0.02))
    async with beside(watching.run()), asyncio.timeout(150):
        await mirror.changed_after(0)
    assert [after for _, after in store.asked].count("") == 2
    assert mirror.kvs[PREFIX + "00000"].value == b""
    assert len(mirror.kvs) == KEYS
