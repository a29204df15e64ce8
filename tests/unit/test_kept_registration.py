# SPDX-License-Identifier: Apache-2.0
"""The registration in the run directory, on a disk that hangs and refuses."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from agent import running
from agent.rundir.files import State
from agent.running import KeptRegistration
from rdzv.members.registration import Held
from tests.support.waiting import DEADLINE_S


class Disk:
    """A run directory: its first write hangs until ``goes_on`` is set, and then may fail."""

    path = Path("run")

    def __init__(self, *, fails: bool = False) -> None:
        self.goes_on = threading.Event()
        self.landed: list[int] = []
        self.has_landed = threading.Event()
        self._fails = fails
        self._begun = False

    def keep(self, state: State) -> None:
        first, self._begun = not self._begun, True
        if first:
            assert self.goes_on.wait(DEADLINE_S)
            if self._fails:
                raise OSError(errno.ENOSPC, "No space left on device")
        assert state.held is not None
        self.landed.append(state.held.incarnation)
        self.has_landed.set()


def held(incarnation: int) -> Held:
    return Held(generation=1, incarnation=incarnation)


async def given_up(keeping: asyncio.Task[None]) -> None:
    """Cancel a wait whose write hangs, as the registrar does at its deadline."""
    await asyncio.wait((keeping,), timeout=0.1)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait((keeping,))


async def test_i6_a_write_that_outlasts_its_wait_lands_before_a_newer_one() -> None:
    disk: Any = Disk()
    kept = KeptRegistration(disk, "uid")
    await given_up(asyncio.create_task(kept.keep(held(1))))
    newer = asyncio.create_task(kept.keep(held(2)))
    await asyncio.wait((newer,), timeout=0.1)
    disk.goes_on.set()
    async with asyncio.timeout(DEADLINE_S):
        await newer
    assert disk.landed == [1, 2]


async def test_a_write_that_fails_after_its_wait_is_logged_and_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "RETRY_PAUSE_S", 0.01)
    caplog.set_level("INFO")
    disk: Any = Disk(fails=True)
    kept = KeptRegistration(disk, "uid")
    await given_up(asyncio.create_task(kept.keep(held(1))))
    disk.goes_on.set()
    assert await asyncio.to_thread(disk.has_landed.wait, DEADLINE_S)
    assert disk.landed == [1]
    kept.end()
    events = [getattr(record, "event", "") for record in caplog.records]
    assert events[:1] == ["state_not_kept"]


async def test_a_defect_of_the_write_is_not_swallowed() -> None:
    disk: Any = Disk()
    disk.goes_on.set()
    disk.landed = None  # what the write appends to
    with pytest.raises(AttributeError):
        async with asyncio.timeout(DEADLINE_S):
            await KeptRegistration(disk, "uid").keep(held(1))
