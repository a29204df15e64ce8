# SPDX-License-Identifier: Apache-2.0
"""How long a leader works that cannot renew its Lease, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controller.leader.decision import GIVE_UP_S
from controller.leader.leadership import Leadership

pytestmark = pytest.mark.virtual


class Lease:
    """The one object of an API server; ``hangs``: it answers nobody any more."""

    def __init__(self) -> None:
        self.version = 0
        self.hangs = False
        self.written_s = 0.0

    async def get(self, path: str) -> dict[str, Any]:
        if self.hangs:
            await asyncio.sleep(3600)
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": {}}

    async def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
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

    running = asyncio.create_task(Leadership(lease, "lease", "one", clock).run(work))
    await asyncio.sleep(60)
    assert [until <= lease.written_s + GIVE_UP_S for until in worked_until] == [True]
    running.cancel()
    await asyncio.wait((running,))
