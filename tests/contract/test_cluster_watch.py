# SPDX-License-Identifier: Apache-2.0
"""Watches on a real connection: one that has died without a word, and ones that are quiet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from controller.access.secret import JobsWithPods
from controller.cluster import api as cluster_api
from controller.cluster import paths
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from tests.support.cluster_api import FakeApi
from tests.support.tasks import beside
from tests.support.waiting import DEADLINE_S

PODS = "/api/v1/pods"
WATCHES = 150
LEASES = "/apis/coordination.k8s.io/v1/namespaces/muster-system/leases"


async def test_a_watch_that_is_silent_ends_so_that_another_shows_whether_anybody_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_api, "QUIET_S", 5.0)
    async with FakeApi(tmp_path) as fake, ClusterApi(fake.access) as api:
        await fake.put(paths.lease("muster-system", "one"), {"spec": {"a": 1}})
        path = f"{LEASES}?fieldSelector=metadata.name=one"
        async with asyncio.timeout(DEADLINE_S):
            seen = [event["object"]["spec"] async for event in api.watch(path, "0")]
    assert seen == [{"a": 1}]


@pytest.mark.parametrize(
    "follow",
    [
        lambda api: Collection(api, PODS, lambda one: one)._follow(),
        lambda api: JobsWithPods(api).run(),
    ],
    ids=["collection", "pods of jobs"],
)
async def test_a_quiet_watch_keeps_its_version_by_bookmarks(
    follow: Callable[[ClusterApi], Coroutine[None, None, None]], tmp_path: Path
) -> None:
    async with FakeApi(tmp_path) as fake, ClusterApi(fake.access) as api:
        async with beside(follow(api)):
            await fake.until_watched()
        (asked,) = fake.watches
        assert asked["allowWatchBookmarks"] == "true"


async def test_many_watches_keep_no_call_waiting(tmp_path: Path) -> None:
    """One for each namespace whose pods all ask, for example."""
    async with FakeApi(tmp_path) as fake, ClusterApi(fake.access) as api, AsyncExitStack() as stack:
        await fake.put(paths.lease("muster-system", "one"), {"spec": {}})
        for _ in range(WATCHES):
            await stack.enter_async_context(beside(Collection(api, PODS, dict)._follow()))
        await fake.until_watched(WATCHES)
        await api.get(paths.lease("muster-system", "one"))
