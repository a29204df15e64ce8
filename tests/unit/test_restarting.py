# SPDX-License-Identifier: Apache-2.0
"""Launchers that end, and processes that outlive them; a warm rank's variables and its wait."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import Config
from launcher_shim.pod import launch
from launcher_shim.pod.launch import VARIABLE, Orphans, World, keeps_orphans, orphans_of, world_of
from launcher_shim.pod.ranks import RESTART_STEPS, Ended, restart_steps, starts_again
from launcher_shim.rundir.rank_reports import StepCount, StepLine, count_from, read_steps
from launcher_shim.warm import worker
from launcher_shim.warm.worker import RANK_0_LOOK_S, RANK_0_WAIT_S, await_rank_0
from muster.progress import ProgressFile
from rdzv.settings import settings_of

TERM, USR1, HUP = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


@pytest.mark.parametrize(
    ("ended", "least", "again"),
    [
        (Ended(1, 200), 200, True),
        (Ended(1, 199), 200, False),
        (Ended(1, 0), 1, False),
        (Ended(1, None), 200, False),
        (Ended(0, 1000), 200, False),
        (Ended(2, None), 200, False),
        (Ended(137, 1000), 200, True),
        (Ended(1, 1000), 0, False),
        (Ended(1, 1000, drained=True), 200, False),
        (Ended(1, 1000, frozenset({TERM})), 200, False),
        (Ended(1, 1000, frozenset({HUP})), 200, False),
        (Ended(1, 1000, frozenset({USR1})), 200, True),
        (Ended(128 + USR1, 1000, frozenset({USR1})), 200, False),
        (Ended(128 + USR1, 1000), 200, True),
    ],
)
def test_only_one_that_ended_by_itself_after_progress_is_started_again(
    ended: Ended, least: int, again: bool
) -> None:
    decided, sentence = starts_again(ended, least)
    assert decided == again
    assert (f"after {ended.steps} steps" in sentence) or not again


@pytest.mark.parametrize("text", ["", "0", " 50 ", "999999999"])
def test_the_number_of_steps_is_read_as_the_sidecar_reads_it(text: str) -> None:
    setting = settings_of(Config)["restart_steps"]
    assert setting.variable == RESTART_STEPS
    assert restart_steps({RESTART_STEPS: text}) == setting.parse(text or str(setting.default))


@pytest.mark.parametrize("text", ["-1", "many", "1.5", "1" * 10])
def test_a_number_of_steps_that_is_none_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=f"{RESTART_STEPS} is .*: give a number of steps"):
        restart_steps({RESTART_STEPS: text})


# --- how many steps ---


def line(pid: int, first: int | None, step: int) -> StepLine:
    return StepLine((pid, 7), first, step)


FORMER = (line(1, 1, 900), line(2, -1, -1))


@pytest.mark.parametrize(
    ("looks", "made"),
    [
        ([], None),
        ([FORMER], None),
        ([[line(3, -1, -1)]], 0),
        ([[line(3, 1, 1)]], 0),
        ([[line(3, 1, 150)], [line(4, 1, 120)]], 149),
        ([[line(3, 1, 150)], [line(4, 101, 250)]], 249),
        ([[line(3, 5001, 5300)]], 299),
        ([[line(3, 1, 40), line(4, 1, 41)]], 40),
        ([[line(3, None, 10)], [line(3, None, 30)]], 20),
        ([[line(1, 1, 950)]], 50),
        ([[line(2, 31, 40)]], 9),
    ],
    ids=[
        "nothing",
        "what lay there",
        "entered",
        "the first step",
        "counts from 0 each time",
        "goes on from a checkpoint",
        "began at a checkpoint",
        "two ranks",
        "an older library",
        "a rank that was there before",
        "a rank that had entered before",
    ],
)
def test_steps_are_counted_from_the_first_that_its_own_ranks_tell(
    looks: list[list[StepLine]], made: int | None
) -> None:
    count = count_from(FORMER)
    for lines in looks:
        count = count.seen(lines)
    assert count.made == made


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=12),
    st.integers(1, 20),
)
def test_what_a_job_has_gained_is_counted_whatever_it_repeats(
    lives: list[tuple[int, int]], every: int
) -> None:
    """Each life of the workers goes on from some checkpoint, and is seen at its end at least."""
    count, saved, highest = StepCount({}), 0, 0
    for pid, (steps, back) in enumerate(lives):
        begin = max(0, saved - back) + 1
        for step in range(begin, begin + steps, every):
            count = count.seen([line(pid, begin, step)])
        highest = max(highest, begin + steps - 1)
        count = count.seen([line(pid, begin, begin + steps - 1)])
        saved = highest
    assert count.made == highest - 1


def test_the_lines_of_the_library_are_counted(tmp_path: Path) -> None:
    ProgressFile(str(tmp_path), {"LOCAL_RANK": "1"}).write(4)
    before = count_from(read_steps(tmp_path))
    file = ProgressFile(str(tmp_path), {})
    file.write(-1)
    (tmp_path / "2.json").write_bytes(b"{}\n")
    assert [(one.first, one.step) for one in read_steps(tmp_path)] == [(-1, -1), (4, 4)]
    file.write(31)
    file.write(40)
    (own, _) = read_steps(tmp_path)
    assert (own.first, own.step) == (31, 40)
    assert before.seen([own]).highest == 40


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


class Rank0:
    """Listens at a look; time is what was slept."""

    def __init__(self, listens_at: int, family: socket.AddressFamily = socket.AF_INET) -> None:
        self.looks = 0
        self._at = listens_at
        address = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.bind((address, 0))
        self.environ = {
            "RANK": "3",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(self.socket.getsockname()[1]),
        }

    def sleep(self, seconds: float) -> None:
        assert seconds == RANK_0_LOOK_S
        self.looks += 1
        if self.looks == self._at:
            self.socket.listen()

    def clock(self) -> float:
        return self.looks * RANK_0_LOOK_S


def wait_for(rank_0: Rank0, **environ: str) -> int:
    """How often it looked in vain."""
    with rank_0.socket:
        await_rank_0({**rank_0.environ, **environ}, rank_0.clock, rank_0.sleep)
    return rank_0.looks


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_rank_goes_on_as_soon_as_rank_0_listens(family: socket.AddressFamily) -> None:
    assert wait_for(Rank0(3, family)) == 3


def test_it_goes_on_without_a_rank_0_that_does_not_listen_in_time() -> None:
    assert wait_for(Rank0(-1)) == pytest.approx(RANK_0_WAIT_S / RANK_0_LOOK_S, abs=1)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {"MASTER_ADDR": ""},
        {"MASTER_ADDR": "localhost"},
        {"MASTER_PORT": "none"},
        {"MASTER_PORT": ""},
    ],
)
def test_it_waits_for_nothing(environ: dict[str, str]) -> None:
    """Rank 0 itself, and whoever was given no address: to look a name up may take seconds."""
    assert wait_for(Rank0(3), **environ) == 0


def imported(folder: Path, reads: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why a zygote does without a module that does ``reads``; empty if it has it."""
    (folder / "reads_it.py").write_text(f"import os\n{reads}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "reads_it", raising=False)
    try:
        worker.load(["reads_it"], set())
    except worker.Unfit as error:
        return str(error)
    return ""


def test_a_variable_of_a_worker_alone_is_not_for_the_zygote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    for name in ("RANK", "NCCL_DEBUG", "HOROVOD_RANK"):
        assert name in imported(tmp_path, f"os.environ.get({name!r})", monkeypatch)


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_DEBUG"])
def test_a_variable_that_the_pod_has_is_known_to_the_zygote(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "eth0")
    assert imported(tmp_path, "dict(os.environ)", monkeypatch) == ""
    assert imported(tmp_path, f"os.environ[{name!r}]", monkeypatch) == ""
