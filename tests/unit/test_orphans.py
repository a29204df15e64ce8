# SPDX-License-Identifier: Apache-2.0
"""Which processes have outlived their world, and which only look like it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping

import pytest

from launcher_shim.pod import launch
from launcher_shim.pod.launch import (
    VARIABLE,
    Orphans,
    World,
    keeps_orphans,
    orphans_of,
    world_of,
)

REAPER = 1
SHELL, TORCHRUN, WORKER, TRACKER, HELPER, BESIDE = 10, 11, 12, 13, 14, 15
NOW, BEFORE = ("digits", "node-0", "4001"), ("digits", "node-0", "4000")

BASE = {SHELL: REAPER, TORCHRUN: SHELL, BESIDE: REAPER}


@pytest.mark.parametrize(
    ("parent_of", "worlds", "orphans"),
    [
        pytest.param({}, {}, set(), id="nothing of a world"),
        pytest.param(
            {WORKER: TORCHRUN, TRACKER: WORKER}, {WORKER: NOW, TRACKER: NOW}, set(), id="all live"
        ),
        pytest.param(
            {WORKER: TORCHRUN, TRACKER: REAPER}, {WORKER: NOW, TRACKER: NOW}, set(), id="a daemon"
        ),
        pytest.param(
            {WORKER: TORCHRUN, TRACKER: REAPER, HELPER: TRACKER},
            {WORKER: NOW, TRACKER: BEFORE, HELPER: BEFORE},
            {TRACKER, HELPER},
            id="left by the world before, with a child",
        ),
        pytest.param({TRACKER: REAPER}, {TRACKER: NOW}, {TRACKER}, id="between two worlds"),
        pytest.param(
            {WORKER: REAPER, TRACKER: WORKER},
            {WORKER: NOW, TRACKER: NOW},
            {WORKER, TRACKER},
            id="its torchrun was killed",
        ),
        pytest.param(
            {WORKER: TORCHRUN, TRACKER: WORKER, HELPER: TRACKER},
            {WORKER: NOW, TRACKER: NOW, HELPER: BEFORE},
            set(),
            id="a torchrun below a worker",
        ),
    ],
)
def test_only_processes_of_ended_worlds_are_orphans(
    parent_of: Mapping[int, int], worlds: Mapping[int, World], orphans: set[int]
) -> None:
    assert orphans_of({**BASE, **parent_of}, worlds) == orphans


def test_a_world_is_named_by_its_run_and_its_master() -> None:
    words = ["A=1", "MASTER_PORT=4000", "MASTER_ADDR=node-0", "TORCHELASTIC_RUN_ID=digits"]
    assert world_of(words) == BEFORE
    # As an operator sets them for a whole container:
    assert world_of(words[:3]) is None
    assert world_of([]) is None


def test_a_setting_that_is_neither_yes_nor_no_is_refused() -> None:
    assert not keeps_orphans({})
    assert not keeps_orphans({VARIABLE: "0"})
    assert keeps_orphans({VARIABLE: "1"})
    with pytest.raises(ValueError, match=VARIABLE):
        keeps_orphans({VARIABLE: "yes"})


async def test_the_event_loop_runs_while_processes_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, may_end = threading.Event(), threading.Event()

    def slow() -> dict[int, int]:
        reads.set()
        assert may_end.wait(60)
        return {}

    monkeypatch.setattr(launch, "parents", slow)
    ending = asyncio.ensure_future(Orphans().end())
    assert await asyncio.to_thread(reads.wait, 60)
    may_end.set()
    await ending


async def test_a_process_that_outlives_sigkill_delays_one_world_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[str] = []
    environ = ["=".join(pair) for pair in zip(launch._NAMES, BEFORE, strict=True)]
    monkeypatch.setattr(launch, "parents", lambda: {TRACKER: os.getpid()})
    monkeypatch.setattr(launch, "parts", lambda path: environ)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number.name))
    for name in ("TERM_TIMEOUT_S", "KILL_TIMEOUT_S"):
        monkeypatch.setattr(launch, name, 0.0)
    here = Orphans()
    for _ in range(2):
        await here.end()
    assert sent == ["SIGTERM", "SIGKILL"]
    monkeypatch.setattr(launch, "parents", dict)
    await here.end()
    monkeypatch.setattr(launch, "parents", lambda: {TRACKER: os.getpid()})
    await here.end()
    assert sent == ["SIGTERM", "SIGKILL"] * 2
