# SPDX-License-Identifier: Apache-2.0
"""A watch whose connection has died without a word, on a real connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controller.cluster import api as cluster_api
from controller.cluster import paths
from controller.cluster.api import ClusterApi
from tests.support.cluster_api import FakeApi
from tests.support.waiting import DEADLINE_S

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
