# SPDX-License-Identifier: Apache-2.0
"""What is logged of a store that does not answer, once, and of one that does so again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from rdzv.errors import StoreRefused, StoreUnavailable
from rdzv.mirror import Mirror, Watching
from rdzv.store import Store
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from rdzv.store.memory.faults import Cut, Faults
from tests.support.sidecars.processes import until
from tests.support.store.etcd_cluster import EtcdCluster

AWAY = "the store does not answer, the last snapshot stays in force: "
REFUSES = "the store refuses, the last snapshot stays in force: "
BACK = "the store answers again"


@asynccontextmanager
async def followed(store: Store) -> AsyncIterator[Mirror]:
    mirror = Mirror("/team/", monotonic)
    following = asyncio.create_task(Watching(store, mirror).run())
    try:
        async with asyncio.timeout(10):
            await mirror.changed_after(0)
        yield mirror
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What the watching has said, with its level."""
    records = [record for record in caplog.records if record.name == "rdzv.mirror"]
    return [(record.levelname, record.getMessage()) for record in records]


async def until_said(caplog: pytest.LogCaptureFixture, beginning: str) -> None:
    async def holds() -> bool:
        return any(sentence.startswith(beginning) for _, sentence in said(caplog))

    await until(holds)


def check_one_outage(caplog: pytest.LogCaptureFixture, away: str = AWAY) -> None:
    (first, away_sentence), (second, back) = said(caplog)
    assert (first, second, back) == ("WARNING", "INFO", BACK)
    assert away_sentence.startswith(away)


async def test_a_watch_that_is_silent_is_told_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cut = Cut()
    async with followed(MemoryStore(MemoryEngine(), faults=cut)) as mirror:
        cut.cut()
        await until_said(caplog, AWAY)
        assert not mirror.healthy(monotonic())
        cut.mend()
        await until_said(caplog, BACK)
        assert mirror.healthy(monotonic())
    check_one_outage(caplog)


@pytest.fixture
def etcd() -> Iterator[EtcdCluster]:
    with EtcdCluster(1) as cluster:
        yield cluster


@pytest.mark.etcd
async def test_a_store_that_is_killed_is_told_once_and_so_is_its_return(
    etcd: EtcdCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with followed(EtcdStore(etcd.endpoints)) as mirror:
        etcd.kill(0)
        await until_said(caplog, AWAY)
        assert not mirror.healthy(monotonic())
        await asyncio.to_thread(etcd.restore)
        await until_said(caplog, BACK)
        assert mirror.healthy(monotonic())
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


@pytest.mark.parametrize(
    ("error", "away"), [(StoreRefused("no right"), REFUSES), (StoreUnavailable("no way"), AWAY)]
)
async def test_a_store_that_cannot_be_read_anew_is_told_once(
    caplog: pytest.LogCaptureFixture, error: StoreRefused | StoreUnavailable, away: str
) -> None:
    faults = Unreadable()
    async with followed(MemoryStore(MemoryEngine(), faults=faults)) as mirror:
        faults.error = error
        await until_said(caplog, away)
        failed = faults.failed

        async def silent_and_asked_again() -> bool:
            return faults.failed > failed + 2 and not mirror.healthy(monotonic())

        await until(silent_and_asked_again)
        faults.error = None
        await until_said(caplog, BACK)
    check_one_outage(caplog, away)
