# SPDX-License-Identifier: Apache-2.0
"""Leadership of a replica that cannot renew its Lease, or lost it unnoticed, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controller.leadership import GIVE_UP_S, Leadership
from rdzv.errors import ClusterRefused

pytestmark = pytest.mark.virtual


class Lease:
    """The one object of an API server; ``hangs``: it answers nobody any more."""

    def __init__(self) -> None:
        self.version = 0
        self.spec: dict[str, Any] = {}
        self.hangs = False
        self.written_s = 0.0

    async def get(self, path: str) -> dict[str, Any]:
        if self.hangs:
            await asyncio.sleep(3600)
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(self.spec)}

    async def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise ClusterRefused("the object has been modified", 409)
        self.version += 1
        self.spec = body["spec"]
        self.written_s = asyncio.get_running_loop().time()
        return body


async def test_who_cannot_renew_stops_before_another_may_begin() -> None:
    clock = asyncio.get_running_loop().time
    lease: Any = Lease()
    worked_until: list[float] = []

    async def work() -> None:
        try:
            lease.hangs = True
            await asyncio.sleep(3600)
        finally:
            worked_until.append(clock())

    running = asyncio.create_task(Leadership(lease, "lease", "one", clock).lead(work))
    await asyncio.sleep(60)
    assert [until <= lease.written_s + GIVE_UP_S for until in worked_until] == [True]
    running.cancel()
    await asyncio.wait((running,))


async def leading(lease: Any) -> asyncio.Task[None]:
    """Start a replica, and wait until it leads."""
    working = asyncio.Event()

    async def work() -> None:
        working.set()
        await asyncio.sleep(3600)

    clock = asyncio.get_running_loop().time
    running = asyncio.create_task(Leadership(lease, "lease", "one", clock).lead(work))
    await working.wait()
    assert lease.spec["holderIdentity"] == "one"
    return running


async def test_a_replica_that_is_stopped_leaves_the_lease_of_another_alone() -> None:
    """It was suspended for longer than the Lease, and is stopped before it reads it again."""
    lease: Any = Lease()
    running = await leading(lease)
    lease.version, lease.spec = lease.version + 1, {"holderIdentity": "two"}
    running.cancel()
    await asyncio.wait((running,))
    assert lease.spec == {"holderIdentity": "two"}


async def test_a_replica_that_is_stopped_releases_its_lease() -> None:
    lease: Any = Lease()
    running = await leading(lease)
    running.cancel()
    await asyncio.wait((running,))
    assert lease.spec["holderIdentity"] == ""
