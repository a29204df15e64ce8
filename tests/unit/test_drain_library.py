# SPDX-License-Identifier: Apache-2.0
"""``muster.drain()`` beside a gate moved by hand: what it tells, when it saves, waits and parks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import muster
import muster.draining
import muster.gate
import muster.progress
from agent.rundir.files import RunDir
from agent.rundir.reports import read_ranks
from muster import boundary, saved_steps
from muster.draining import Drain
from muster.gate import GateFile
from muster.progress import ProgressFile
from rdzv.drain.gate import Gate, Here, Move, local
from rdzv.drain.inputs import LiveRound
from rdzv.records.drain import Commit, LastCommit, Vote
from tests.support.sidecars.pod_gate import DEADLINE_S, PodGate, beside, wait

MASTER = "10.0.0.7:40123"
OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "40123",
    "RANK": "0",
    "WORLD_SIZE": "2",
}
IDLE = Gate(run="job", round=3, master=MASTER)
HOLD = replace(IDLE, epoch=4, phase="hold")
COMMIT = replace(HOLD, phase="commit", step=7)
DONE = replace(COMMIT, phase="done", last_commit=LastCommit(7, 3, 4))
VOID = replace(COMMIT, phase="void", step=None)
ENDING = replace(HOLD, ending=True)
LATER = replace(IDLE, round=4, master="10.0.0.8:40999")
ROOT = str(Path(muster.__file__).parents[1])
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(params=["page", "0.1"])
def pod(tmp_path: Path, request: pytest.FixtureRequest) -> PodGate:
    """The sidecar's side: of this version, or of one that knows no page."""
    pod = PodGate(tmp_path, MASTER, by_page=request.param == "page")
    pod.show(IDLE)
    return pod


@pytest.fixture
def start(pod: PodGate) -> Iterator[Start]:
    """Starts a rank that runs some code; none outlives its test."""
    running: list[subprocess.Popen[str]] = []

    def started(code: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={"PYTHONPATH": ROOT, "MUSTER_RUN_DIR": str(pod.run_dir), **OF_TORCHRUN},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield started
    for process in running:
        process.kill()
        process.communicate()


def make(pod: PodGate) -> Drain:
    return Drain(
        ProgressFile(str(pod.run_dir / "progress"), OF_TORCHRUN), GateFile(str(pod.run_dir))
    )


def seen(drain: Drain) -> tuple[bool, str, float | None]:
    return drain.leaving, drain.reason, drain.seconds_left


class Loop:
    """A training loop from step 1 on: what it saved, and how far it came. Ends at ``last``.

    ``entered`` is called before the first step.
    """

    def __init__(
        self,
        pod: PodGate,
        last: int,
        save_error: Exception | None = None,
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        self._drain = make(pod)
        self._last = last
        self._save_error = save_error
        self._entered = entered
        self.step = 0
        self.saved: list[int] = []

    def __call__(self) -> None:
        with self._drain as drain:
            self._entered()
            for step in range(1, self._last + 1):
                self.step = step
                if drain.commit_due(step):
                    if self._save_error is not None:
                        raise self._save_error
                    self.saved.append(step)
                    drain.committed(step)


def test_a_rank_tells_each_boundary_and_goes_on(pod: PodGate) -> None:
    with make(pod) as drain:
        assert (pod.told().drain, pod.told().step) == (True, -1)
        for step in (3, 4, 8):
            assert drain.commit_due(step) is False
            told = pod.told()
            assert (told.step, told.held, told.acked, told.failed) == (step, False, None, None)
            assert (told.master, told.drain) == (MASTER, True)
    assert (pod.told().step, pod.told().drain) == (8, False)


@pytest.mark.parametrize(("took_s", "told_s"), [(40.0, 40.0), (0.5, 0.0), (-5.0, 0.0)])
def test_a_periodic_save_is_timed_from_its_boundary(
    pod: PodGate, monkeypatch: pytest.MonkeyPatch, took_s: float, told_s: float
) -> None:
    with make(pod) as drain:
        drain.commit_due(1)
        began = time.time()
        with monkeypatch.context() as later:
            later.setattr(time, "time", lambda: began + took_s)
            drain.committed(1)
        assert pod.told().save_s == pytest.approx(told_s, abs=0.2)
        drain.commit_due(2)
        drain.committed(1)
        assert pod.told().save_s == pytest.approx(told_s, abs=0.2)


def test_a_long_wait_says_once_what_for(
    pod: PodGate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(muster.gate, "SAY_S", 0.05)
    pod.show(HOLD)
    with beside(Loop(pod, 1)):
        wait(lambda: "before its first step: the ranks of this world are agreeing" in caplog.text)
        time.sleep(0.1)
        pod.show(VOID)
    assert len(caplog.records) == 1


def test_held_then_saved_at_the_step_agreed_on_then_on_its_way_again(pod: PodGate) -> None:
    loop = Loop(pod, 12, entered=lambda: pod.show(HOLD))
    with beside(loop):
        pod.until(lambda told: told.held)
        assert pod.told().step == 1
        pod.show(COMMIT)
        pod.until(lambda told: told.acked == (4, 7))
        assert (pod.told().held, loop.saved, loop.step) == (False, [7], 7)
        pod.show(DONE)
        time.sleep(0.05)
        assert loop.step == 7, "parked until the gate lets it go"
        pod.show(replace(IDLE, epoch=4))
    assert (loop.step, loop.saved) == (12, [7])
    assert pod.told().acked == (4, 7)


def test_void_lets_it_go_on_and_the_next_attempt_saves_again(pod: PodGate) -> None:
    pod.show(replace(COMMIT, step=2))
    loop = Loop(pod, 9)
    with beside(loop):
        pod.until(lambda told: told.acked == (4, 2))
        pod.show(replace(HOLD, epoch=5))
        pod.until(lambda told: told.held)
        assert loop.step == 2, "what is saved already is saved in the next attempt, too"
        pod.show(replace(COMMIT, epoch=5, step=2))
        pod.until(lambda told: told.acked == (5, 2))
        pod.show(replace(COMMIT, epoch=6, step=4))
        pod.until(lambda told: told.acked == (6, 4))
        pod.show(replace(VOID, epoch=6))
    assert loop.saved == [2, 4]


def test_a_save_that_raises_is_told_and_goes_on_to_the_script(pod: PodGate) -> None:
    pod.show(replace(COMMIT, step=2))
    with pytest.raises(OSError, match="No space"), beside(Loop(pod, 9, OSError(28, "No space"))):
        pod.until(lambda told: told.failed)
    told = pod.told()
    assert told.failed == (4, "OSError: [Errno 28] No space")
    assert told.acked is None


def test_a_loop_that_ends_or_trains_on_unsaved_has_failed(pod: PodGate) -> None:
    pod.show(replace(COMMIT, step=2))
    with make(pod) as drain:
        assert drain.commit_due(2)
    assert pod.told().failed == (4, "the loop ended before drain.committed() was called")
    pod.show(replace(COMMIT, step=3, epoch=5))
    results: list[bool] = []
    with make(pod) as drain:
        assert drain.commit_due(3)
        with beside(lambda: results.append(drain.commit_due(4))):
            pod.until(lambda told: told.failed and told.failed[0] == 5)
            pod.show(VOID)
        assert results == [False]
        told = pod.told()
        assert told.failed == (5, "the script trained on without calling drain.committed(3)")
        assert told.step == 4


def test_a_script_that_goes_on_after_a_failed_save_says_so_and_waits_for_the_others(
    pod: PodGate,
) -> None:
    pod.show(replace(COMMIT, step=2))
    with make(pod) as drain:
        drain.failed(1, "nothing is due")
        assert drain.commit_due(2)
        for wrong in (partial(drain.failed, 1, ""), partial(drain.committed, 3)):
            with pytest.raises(ValueError, match="the save of step 2 is due"):
                wrong()
        with beside(lambda: drain.failed(2, "no space")) as waits:
            pod.until(lambda told: told.failed == (4, "no space"))
            time.sleep(0.02)
            assert waits.is_alive(), "the others wait as well"
            pod.show(replace(HOLD, epoch=5))
            pod.until(lambda told: told.held)
            pod.show(replace(COMMIT, epoch=5, step=2))
            pod.until(lambda told: told.failed == (5, "no space"))
            pod.show(replace(VOID, epoch=5))
        assert drain.commit_due(3) is False


def moved(pod: PodGate, commit: Commit, vote: Vote | None = None) -> Move:
    """What the sidecar makes of its ranks' progress and of the gate that it shows."""
    ranks = read_ranks(pod.run_dir / "progress")
    return local(
        Here("member", "uid", replace(pod.gate, reason=""), ranks),
        commit=commit,
        round=LiveRound("job", 3, True, ("member",), master=MASTER),
        drain=None,
        vote=vote,
        last_commit=None,
    )


def test_a_sidecar_counts_a_rank_that_has_left_its_loop_as_a_save_that_failed(pod: PodGate) -> None:
    pod.show(replace(COMMIT, step=2))
    drain = make(pod).__enter__()
    assert drain.commit_due(1) is False
    drain.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    vote = Vote(4, 3, "uid", 2, mod_revision=9)
    move = moved(pod, Commit(4, "job", 3, "commit", 2, leaving=("uid",)), vote)
    assert move.vote == replace(vote, failed="local rank 0 has left its training loop")


def test_a_grant_never_lets_it_return(pod: PodGate) -> None:
    pod.show(replace(COMMIT, step=2))
    loop = Loop(pod, 9)
    with beside(loop):
        pod.until(lambda told: told.acked)
        pod.show(replace(DONE, step=2, leaving=True, granted=True))
        time.sleep(0.05)
        pod.show(replace(LATER, epoch=4))
        time.sleep(0.05)
        assert loop.step == 2, "a later round is not its own"
        pod.show(replace(VOID, epoch=4))  # only to end the test
    assert loop.saved == [2]


LAUNCHER = """
import json, os, subprocess, sys
command = [*sys.argv[2:], sys.executable, "-c", sys.argv[1]]
rank = subprocess.Popen(command, env={**os.environ, **json.loads(os.environ["OF_TORCHRUN"])})
rank.wait()
"""
PARKED = """
import muster, os
print(os.getpid(), flush=True)
with muster.drain() as drain:
    assert drain.commit_due(1)
    drain.committed(1)
"""


@pytest.mark.parametrize(
    "wrapper",
    [
        (),
        ("sh", "-c", '"$@" & wait', "train.sh"),
        ("sh", "-c", 'sh -c \'"$@"; exit\' inner "$@"; exit', "outer"),
    ],
    ids=["direct", "in a script", "in two"],
)
def test_one_that_waits_ends_when_its_torchrun_is_killed(
    wrapper: tuple[str, ...], pod: PodGate
) -> None:
    pod.show(replace(COMMIT, step=1))
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, PARKED, *wrapper],
        env={
            **os.environ,
            "MUSTER_RUN_DIR": str(pod.run_dir),
            "OF_TORCHRUN": json.dumps(OF_TORCHRUN),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    try:
        pod.until(lambda told: told.acked == (4, 1))
        launcher.kill()
        # The rank holds the other end: it is read to its end once that process is gone.
        ended = Thread(target=launcher.stdout.read, daemon=True)
        ended.start()
        ended.join(DEADLINE_S)
        assert not ended.is_alive(), "the rank waits for ever"
    finally:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
        launcher.wait()
        launcher.stdout.close()


def test_a_round_that_is_over_before_the_first_boundary_is_over(pod: PodGate) -> None:
    with make(pod) as drain:
        pod.show(LATER)
        with beside(lambda: drain.commit_due(1)) as waits:
            time.sleep(0.02)
            assert waits.is_alive(), "its agent is about to stop it"
            pod.show(IDLE)


def test_the_gate_of_an_earlier_round_is_none(pod: PodGate) -> None:
    pod.show(replace(HOLD, round=2, master="10.0.0.9:1"))
    with make(pod) as drain:
        assert drain.commit_due(1) is False
        assert seen(drain) == (False, "", None)


def test_what_is_told_of_a_drain_can_be_read(pod: PodGate) -> None:
    deadline = time.clock_gettime(time.CLOCK_BOOTTIME) + 2000
    pod.show(replace(IDLE, leaving=True, reason="node is shut down", deadline_boot_s=deadline))
    with make(pod) as drain:
        assert drain.leaving
        assert drain.reason == "node is shut down"
        left_s = drain.seconds_left
        assert left_s is not None
        assert 1000 < left_s <= 2000
        pod.show(replace(pod.gate, deadline_boot_s=deadline - 3000))
        assert drain.seconds_left == 0
        pod.show(IDLE)
        assert seen(drain) == (False, "", None)


def test_it_tells_before_it_looks(pod: PodGate, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    write, read = ProgressFile.write, GateFile.read

    def tell(*arguments: Any) -> None:
        done.append("tell")
        write(*arguments)

    def look(gate: GateFile) -> Any:
        done.append("look")
        return read(gate)

    monkeypatch.setattr(ProgressFile, "write", tell)
    monkeypatch.setattr(GateFile, "read", look)
    with make(pod) as drain:
        done.clear()
        drain.commit_due(1)
        assert done == ["tell", "look"]


def test_a_save_that_no_drain_asked_for_is_told_and_nothing_else_changes(pod: PodGate) -> None:
    with make(pod) as drain:
        drain.commit_due(20)
        (before,) = read_ranks(pod.run_dir / "progress")
        drain.committed(20)
        assert read_ranks(pod.run_dir / "progress") == (replace(before, saved=(20,)),)
        drain.commit_due(25)
        with beside(lambda: drain.committed(24)):
            pass
        assert pod.told().saved == (20,), "another thread must not undo what is published"
        drain.commit_due(26)
        assert pod.told().saved == (24,)
        drain.committed(30)
        assert pod.told().saved == (24,), "the rank has not come there yet"
    assert pod.told().saved == (24,)
    with make(pod) as drain:
        drain.commit_due(1)
        assert pod.told().saved == ()


def test_a_save_of_another_thread_is_told_at_the_end_of_the_loop_as_well(
    pod: PodGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def save(step: int) -> str:
        told.append(step)
        return ""

    listener = saved_steps.Listener(lambda step: None, save)
    monkeypatch.setattr(saved_steps, "listeners", [listener])
    with make(pod) as drain:
        drain.commit_due(20)
        with beside(lambda: drain.committed(20)):
            pass
        assert told == [], "shards are not for two threads"
    assert told == [20]
    assert pod.told().saved == (20,)


def test_between_two_loops_a_rank_is_away_and_stays_where_it_was(pod: PodGate) -> None:
    file = ProgressFile(str(pod.run_dir / "progress"), OF_TORCHRUN)
    gate = GateFile(str(pod.run_dir))
    told = []
    for first in (1, 4):
        with Drain(file, gate) as drain:
            told.append(pod.told())
            for step in range(first, first + 3):
                drain.commit_due(step)
        told.append(pod.told())
    assert [(one.step, one.drain, one.away) for one in told] == [
        (-1, True, False),
        (3, False, True),
        (3, True, False),
        (6, False, True),
    ]


def test_a_step_agreed_on_between_two_loops_is_saved_in_the_second(pod: PodGate) -> None:
    drain = make(pod)
    with drain:
        drain.commit_due(2)
    pod.show(HOLD)
    commit = Commit(4, "job", 3, "hold")
    vote = moved(pod, commit).vote
    assert vote == Vote(4, 3, "uid", 3, away=True)
    pod.show(replace(COMMIT, step=3))
    saving = replace(commit, phase="commit", step=3)
    assert moved(pod, saving, replace(vote, mod_revision=9)).vote is None, "it is waited for"
    with drain:
        assert drain.commit_due(3)
        with beside(lambda: drain.committed(3)):
            pod.until(lambda told: told.acked == (4, 3))
            pod.show(VOID)


def test_a_step_of_the_former_count_is_refused_by_a_loop_that_counts_anew(pod: PodGate) -> None:
    drain = make(pod)
    with drain:
        drain.commit_due(7)
    pod.show(replace(COMMIT, step=8))
    with drain:
        assert drain.commit_due(1) is False
        assert pod.told().failed == (4, "the loop counts its steps anew")
        pod.show(replace(COMMIT, epoch=5, step=2))
        assert drain.commit_due(2)
        with beside(lambda: drain.committed(2)):
            pod.until(lambda told: told.acked == (5, 2))
            pod.show(VOID)


def test_a_process_that_ends_between_two_loops_is_not_waited_for(
    pod: PodGate, start: Start
) -> None:
    code = (
        "import muster\n"
        "for first in (1, 3):\n"
        "    with muster.drain() as drain:\n"
        "        for step in (first, first + 1):\n"
        "            drain.commit_due(step)\n"
    )
    process = start(code)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    told = pod.told()
    assert (told.step, told.drain, told.away) == (4, False, False)


def test_a_rank_that_cannot_tell_trains_on_and_says_so_once(
    pod: PodGate, caplog: pytest.LogCaptureFixture
) -> None:
    (pod.run_dir / "progress").write_text("a file where the directory should be")
    loop = Loop(pod, 3)
    loop()
    assert loop.step == 3
    (message,) = (record.getMessage() for record in caplog.records)
    assert "training goes on" in message


@pytest.mark.parametrize("when", ["running", "parked"])
def test_nothing_untrue_stands_where_a_rank_cannot_tell(
    pod: PodGate, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = False
    pwrite = os.pwrite

    def write(descriptor: int, line: bytes, at: int) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, line, at)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line, 0))
    path = pod.run_dir / "progress" / "0.json"
    with make(pod) as drain:
        drain.commit_due(1)
        if when == "running":
            full = True
            assert drain.commit_due(2) is False
            assert not path.exists()
            full = False
            assert drain.commit_due(3) is False
            assert pod.told().step == 3
        else:
            pod.show(replace(COMMIT, step=2))
            assert drain.commit_due(2)
            full = True
            with beside(lambda: drain.committed(2)) as parked:
                wait(lambda: not path.exists())
                time.sleep(0.02)
                assert parked.is_alive(), "an acknowledgement that cannot be told is told later"
                full = False
                pod.until(lambda told: told.acked == (4, 2))
                pod.show(IDLE)
    assert len(caplog.records) == 1


def test_a_rank_at_a_cut_gate_tells_that_the_epoch_failed_and_trains_on(pod: PodGate) -> None:
    with make(pod) as drain:
        pod.show(HOLD)
        with beside(lambda: drain.commit_due(1)):
            pod.until(lambda told: told.held)
            pod.show(replace(HOLD, cut=True))
        told = pod.told()
        assert (told.held, told.failed) == (False, (4, boundary.CUT))
        pod.show(replace(COMMIT, epoch=5, step=2))
        assert drain.commit_due(2)
        with beside(lambda: drain.committed(2)):
            pod.until(lambda told: told.acked == (5, 2))
            pod.show(replace(COMMIT, epoch=5, step=2, cut=True))
        told = pod.told()
        assert (told.acked, told.failed) == ((5, 2), (5, boundary.CUT))


def test_i7_a_rank_at_a_cut_gate_that_can_tell_nothing_and_take_nothing_back_stays(
    pod: PodGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    def write(descriptor: int, line: bytes, at: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            fail()
        return pwrite(descriptor, line, at)  # by the sidecar

    with make(pod) as drain:
        pod.show(replace(COMMIT, step=2))
        assert drain.commit_due(2)
        with beside(lambda: drain.committed(2)) as parked:
            pod.until(lambda told: told.acked == (4, 2))
            with monkeypatch.context() as broken:
                broken.setattr(os, "pwrite", write)
                broken.setattr(os, "unlink", fail)
                pod.show(replace(COMMIT, step=2, cut=True))
                time.sleep(0.05)
                assert parked.is_alive(), "its sidecar would acknowledge what lies there"
            pod.until(lambda told: told.failed == (4, boundary.CUT))


@pytest.mark.parametrize("pod", ["0.1"], indirect=True)
def test_a_gate_that_makes_no_sense_leaves_the_former_one_in_force(
    pod: PodGate, caplog: pytest.LogCaptureFixture
) -> None:
    pod.show(replace(IDLE, reason="so far"))
    gate = pod.run_dir / "gate.json"
    with make(pod) as drain:
        assert drain.reason == "so far"
        for content in (b"", b"[]", b"{}", b"\xff", gate.read_bytes().replace(b"idle", b"dile")):
            gate.write_bytes(content)
            assert drain.reason == "so far"
        gate.unlink()
        assert drain.reason == "so far"
        assert len(caplog.records) == 1
        pod.show(replace(IDLE, reason="again"))
        assert drain.reason == "again"


def test_a_rank_waits_for_the_gate_of_its_round_before_it_reads_the_last_commit(
    pod: PodGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.be_rank(monkeypatch, **OF_TORCHRUN)
    monkeypatch.setattr(muster.gate, "OWN_ROUND_WAIT_S", 60.0)
    (pod.run_dir / "env").touch()
    found: list[int | None] = []
    pod.show(Gate(run="job", round=2, master="10.0.0.9:1", last_commit=LastCommit(20, 1, 2)))
    with beside(lambda: found.append(muster.last_commit())) as waits:
        time.sleep(0.02)
        assert waits.is_alive()
        pod.show(replace(IDLE, last_commit=LastCommit(41, 2, 3)))
    assert found == [41]


@pytest.mark.parametrize("pod", ["0.1"], indirect=True)
def test_the_wait_for_its_round_is_bounded_and_said(
    pod: PodGate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(muster.gate, "OWN_ROUND_WAIT_S", 0.02)
    (pod.run_dir / "env").touch()
    (pod.run_dir / "gate.json").unlink()
    file, gate = (
        ProgressFile(str(pod.run_dir / "progress"), OF_TORCHRUN),
        GateFile(str(pod.run_dir)),
    )
    assert not gate.wait_for_own(file.rank)  # as muster.last_commit() does
    monkeypatch.setattr(muster.gate, "OWN_ROUND_WAIT_S", 60.0)
    with Drain(file, gate) as drain:
        assert drain.commit_due(1) is False
    (said,) = caplog.records
    assert "has not confirmed within" in said.getMessage()


SCRIPT = """
import signal, sys
import muster
if "handler" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: print("handled", flush=True))
with muster.drain() as drain:
    if "waits" in sys.argv:
        print("entered", flush=True)
        sys.stdin.readline()
    for step in range(1, 4):
        if drain.commit_due(step):
            drain.committed(step)
"""


FORKS = """
import atexit, os, sys
import muster

def in_a_child(does):
    child = os.fork()
    if not child:
        does()
        sys.exit(0)
    os.waitpid(child, 0)

def fail():
    raise ArithmeticError("in a child")

def calls(drain):
    for call in (drain.commit_due, drain.committed):
        try:
            call(2)
        except RuntimeError as error:
            print(error, flush=True)

with muster.drain() as drain:
    assert drain.commit_due(2)
    in_a_child(lambda: None)
    in_a_child(lambda: muster.report_step(9))
    in_a_child(lambda: calls(drain))
    in_a_child(fail)
    print("asked", flush=True)
    sys.stdin.readline()
    drain.committed(2)
"""


def test_a_forked_child_does_not_speak_for_its_rank(pod: PodGate, start: Start) -> None:
    pod.show(replace(COMMIT, step=2))
    process = start(FORKS)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == [
        "drain.commit_due(2) in a process that was forked from the rank: call it in the rank's"
        " own\n",
        "drain.committed(2) in a process that was forked from the rank: call it in the rank's"
        " own\n",
        "asked\n",
    ]
    told = pod.told()
    assert (told.pid, told.step, told.drain, told.failed) == (process.pid, 2, True, None)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    pod.until(lambda told: told.acked == (4, 2))


FORKED_RANK = """
import os, sys
import muster

muster.last_commit()  # this process tells nothing itself
child = os.fork()
if not child:
    muster.report_step(5)
    os._exit(0)
os.waitpid(child, 0)
print(child)
"""


def test_a_rank_that_its_launcher_forks_speaks_for_itself(pod: PodGate, start: Start) -> None:
    said, _ = start(FORKED_RANK).communicate(timeout=DEADLINE_S)
    assert (pod.told().step, pod.told().pid) == (5, int(said))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("gates", "handler"),
    [
        ([HOLD], []),
        ([replace(COMMIT, step=1)], []),
        ([replace(COMMIT, step=1)], ["handler"]),
        ([HOLD, LATER], ["handler"]),
        ([ENDING], ["handler"]),
    ],
    ids=["held", "parked", "parked-with-handler", "over-with-handler", "ending-with-handler"],
)
def test_a_rank_that_waits_ends_by_a_signal(
    pod: PodGate, start: Start, gates: list[Gate], number: signal.Signals, handler: list[str]
) -> None:
    process = start(SCRIPT, "waits", *handler)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "entered\n"
    pod.show(gates[0])
    process.stdin.write("\n")
    process.stdin.flush()
    pod.until(lambda told: told.held or told.acked)
    for gate in gates[1:]:
        pod.show(gate)
    _end_by(process, number)


def _end_by(process: subprocess.Popen[str], number: signal.Signals) -> None:
    def ended() -> bool:
        process.send_signal(number)  # again: it may not have looked at the gate before the first
        return process.poll() is not None

    wait(ended)
    assert process.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("gate", "handler"), [(HOLD, []), (ENDING, []), (ENDING, ["handler"])])
def test_a_rank_that_has_not_begun_ends_by_a_signal(
    pod: PodGate, start: Start, gate: Gate, number: signal.Signals, handler: list[str]
) -> None:
    pod.show(gate)
    process = start(SCRIPT, *handler)
    pod.until(lambda told: told.drain)
    _end_by(process, number)
    assert pod.told().step == -1


def test_i2_a_rank_begins_no_step_while_the_others_of_its_round_are_held(pod: PodGate) -> None:
    loop = Loop(pod, 3)
    pod.show(HOLD)
    with beside(loop):
        pod.until(lambda told: told.drain)
        for gate in (ENDING, HOLD):
            pod.show(gate)
            time.sleep(0.02)
            assert (loop.step, pod.told().step) == (0, -1)
        pod.show(VOID)
    assert loop.step == 3


def test_a_rank_that_is_interrupted_before_it_begins_has_left_its_loop(
    pod: PodGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    pod.show(HOLD)
    drain = make(pod)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            drain.__enter__()
    assert pod.told().drain is False
    pod.show(VOID)
    with drain:
        assert pod.told().drain is True


@pytest.mark.parametrize("handler", [[], ["handler"]])
def test_a_rank_of_a_pod_that_was_let_go_ends_with_the_job(
    pod: PodGate, start: Start, handler: list[str]
) -> None:
    pod.show(replace(COMMIT, step=1))
    process = start(SCRIPT, *handler)
    pod.until(lambda told: told.acked)
    pod.show(replace(LATER, leaving=True, granted=True))
    time.sleep(0.05)
    assert process.poll() is None, "the others train on"
    pod.show(replace(LATER, leaving=True, granted=True, ended=True))
    _, said = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, "its run has succeeded" in said) == (0, True)


def test_no_effect_without_a_sidecar(tmp_path: Path) -> None:
    code = (
        "import muster\n"
        "assert muster.last_commit() is None\n"
        "with muster.drain() as drain:\n"
        "    for step in range(1, 100):\n"
        "        muster.report_step(step)\n"
        "        assert not drain.commit_due(step)\n"
        "        drain.committed(step)\n"
        "    assert (drain.leaving, drain.reason, drain.seconds_left) == (False, '', None)\n"
    )
    environ = {"PYTHONPATH": ROOT, "PYTHONWARNINGS": "error"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_ends_well_also_where_nobody_reads_its_output_any_more() -> None:
    code = "import sys; from muster.process import end_well; sys.stdout.close(); end_well('so')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


@pytest.mark.parametrize("variables", [OF_TORCHRUN, {}])
def test_a_rank_of_torchrun_announces_itself_at_the_import(
    pod: PodGate, variables: dict[str, str]
) -> None:
    (pod.run_dir / "progress").mkdir(exist_ok=True)
    for _ in range(2):  # the next world's file replaces this one's
        subprocess.run(
            [sys.executable, "-c", "import muster"],
            env={"PYTHONPATH": ROOT, "MUSTER_RUN_DIR": str(pod.run_dir), **variables},
            check=True,
        )
    master = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}" if variables else ""
    assert RunDir(str(pod.run_dir)).imported() == master
    assert not read_ranks(pod.run_dir / "progress")


def test_an_import_outlives_a_run_directory_that_takes_no_file(tmp_path: Path) -> None:
    script = "import muster; print(muster.__version__)"
    environment = {"PYTHONPATH": ROOT, "MUSTER_RUN_DIR": str(tmp_path / "none"), **OF_TORCHRUN}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert not list(tmp_path.iterdir())
