# SPDX-License-Identifier: Apache-2.0
"""What a sidecar says of the version of its store's server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from agent import process
from agent.upkeep import StoreVersion
from rdzv.errors import StoreUnavailable
from rdzv.store import DEFAULT_TIMEOUT_S, StoreStatus
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.in_process import configured
from tests.support.sidecars.jobs import client
from tests.support.sidecars.processes import until
from tests.support.tasks import beside


class Versioned(MemoryStore):
    """Says of itself what it is told to."""

    def __init__(self, engine: MemoryEngine, *versions: str) -> None:
        super().__init__(engine)
        self._versions = list(versions)
        self.asked = 0

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStatus:
        """Tell the next version, and the last one again and again; an empty one is no answer."""
        self.asked += 1
        version = self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]
        if not version:
            raise StoreUnavailable("status: no answer")
        return replace(await super().status(timeout_s=timeout_s), version=version)


@asynccontextmanager
async def judging(store: Versioned) -> AsyncIterator[None]:
    async with (
        client(store.engine) as one,
        beside(StoreVersion(replace(one, store=store), monotonic, repeat_s=0.01).run()),
    ):
        yield


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if vars(record).get("event") == "store_version"
    ]


async def until_asked(store: Versioned, times: int) -> None:
    await until(lambda: store.asked >= times)


@pytest.mark.parametrize(
    ("versions", "asked", "levels", "last"),
    [
        (("3.5.7",), 5, ["WARNING"], ("etcd 3.5.7", "ahead of pending events", "use 3.5.23")),
        (("3.6.16", "", "3.6.16", "3.5.1"), 6, ["INFO", "WARNING"], ("etcd 3.5.1",)),
    ],
    ids=["told once", "another one is told of too"],
)
async def test_each_version_is_told_once(
    caplog: pytest.LogCaptureFixture,
    versions: tuple[str, ...],
    asked: int,
    levels: list[str],
    last: tuple[str, ...],
) -> None:
    caplog.set_level(logging.INFO)
    store = Versioned(MemoryEngine(), *versions)
    async with judging(store):
        await until_asked(store, asked)
    assert [level for level, _ in said(caplog)] == levels
    assert all(words in said(caplog)[-1][1] for words in last)


async def test_a_sidecar_judges_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("rdzv.store.memory.server_calls.VERSION", "3.5.1")
    # A busy machine may give it no answer in time.
    monkeypatch.setattr("agent.parts.StoreVersion", partial(StoreVersion, repeat_s=0.1))
    async with (
        EmbeddedServer() as server,
        beside(process.run(configured(server.endpoint, tmp_path))),
    ):
        await until(lambda: bool(said(caplog)))
    ((level, sentence),) = said(caplog)
    assert (level, "can lose writes" in sentence) == ("WARNING", True)
