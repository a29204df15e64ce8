# SPDX-License-Identifier: Apache-2.0
"""A wait for news of drains that fails is told, not taken for news: it would fail again at once."""

from __future__ import annotations

import pytest

from rdzv.reconcile import first_of
from rdzv.snapshot import Snapshot
from tests.support.sidecars.drains import job


async def test_a_wait_that_fails_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(known: Snapshot) -> Snapshot:
        raise ZeroDivisionError("planted")

    async with job("a") as one:
        pod = one.pods["a"]
        own, sight = pod.drains.own, pod.drains.coordinator._view
        known = await sight.snapshot()
        monkeypatch.setattr(pod.membership, "changed_from", fail)
        step = await own.step()
        with pytest.raises(ZeroDivisionError):
            await first_of(*own._waits(step))
        with pytest.raises(ZeroDivisionError):
            await sight.changed_from(known)
        await pod.kill()
