# SPDX-License-Identifier: Apache-2.0
"""What a pod's next sidecar is to know of its stages, written while more of them end."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest

from launcher_shim.c10d.rounds.stages import KeptStages, Stages
from tests.support.waiting import DEADLINE_S


class SlowFiles:
    """A disk on which the first write is slow: it goes on once ``released``."""

    def __init__(self) -> None:
        self.first_begun, self.released = Event(), Event()
        self.on_disk: list[bytes] = []

    def content(self, name: str) -> bytes | None:
        return None

    def put(self, name: str, content: bytes) -> None:
        if not self.first_begun.is_set():
            self.first_begun.set()
            assert self.released.wait(DEADLINE_S)
        self.on_disk.append(content)


async def test_the_newest_stages_are_written_last_however_slow_the_disk_is() -> None:
    files = SlowFiles()
    stages = KeptStages(files)
    stages.stages.finish("container", "digits")
    first = asyncio.create_task(stages.keep())
    assert await asyncio.to_thread(files.first_begun.wait, DEADLINE_S)
    stages.stages.finish("container", "digits (stage 2)")
    second = asyncio.create_task(stages.keep())
    await asyncio.wait([second], timeout=0.2)
    files.released.set()
    assert await first
    assert await second
    assert files.on_disk[-1] == stages.stages.to_json()


async def test_what_a_client_was_not_told_is_taken_back() -> None:
    """It has given up, and starts its torchrun in the stage that it asked for."""
    files = SlowFiles()
    stages = KeptStages(files)
    passing = asyncio.create_task(stages.pass_over("c" * 32, "digits"))
    assert await asyncio.to_thread(files.first_begun.wait, DEADLINE_S)
    passing.cancel()
    await asyncio.sleep(0)
    files.released.set()
    with pytest.raises(asyncio.CancelledError):
        await passing
    assert stages.stages.next("c" * 16, "digits") == "digits"
    assert [Stages.from_json(kept).finished for kept in files.on_disk] == [{"digits": 1}, {}]
