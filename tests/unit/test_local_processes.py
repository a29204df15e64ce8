# SPDX-License-Identifier: Apache-2.0
"""Processes are found by their marks, and none outlives its run."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

import console
from console.local.node import start_nothing_again
from console.local.processes import NODE_MARK, RUN_MARK, end_all, free_ports, marked, send_to_all
from console.local.settings import read_delivery
from launcher_shim.pod.ranks import restart_steps

ROOT = Path(console.__file__).parent.parent
PATIENCE_S = 60.0

ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def run() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    assert end_all(lambda: marked(name), set(), time.monotonic() + PATIENCE_S) == set()


def start(command: list[str], run: str, node: str) -> subprocess.Popen[str]:
    environ = {**os.environ, RUN_MARK: run, NODE_MARK: node}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.01)


def close(process: subprocess.Popen[str]) -> None:
    process.wait(PATIENCE_S)
    if process.stdout is not None:
        process.stdout.close()


def test_a_node_is_its_own_processes_and_no_others(run: str) -> None:
    first = start(["sleep", "600"], run, "node-0")
    second = start(["sleep", "600"], run, "node-1")
    longer_name = start(["sleep", "600"], run, "node-10")
    wait_until(lambda: len(marked(run)) == 3)
    assert marked(run, "node-1") == {second.pid}
    left = end_all(lambda: marked(run, "node-1"), {second.pid}, time.monotonic() + PATIENCE_S)
    assert left == set()
    assert second.wait(PATIENCE_S) == -signal.SIGKILL
    assert marked(run) == {first.pid, longer_name.pid}
    end_all(lambda: marked(run), {first.pid, longer_name.pid}, time.monotonic() + PATIENCE_S)
    for process in (first, second, longer_name):
        close(process)


def test_an_orphan_in_its_own_session_is_still_found(run: str) -> None:
    parent = start([sys.executable, "-c", ORPHAN], run, "node-0")
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    close(parent)
    wait_until(lambda: marked(run) == {orphan})


def test_a_stopped_node_goes_on(run: str) -> None:
    process = start(["sleep", "600"], run, "node-0")
    wait_until(lambda: marked(run) == {process.pid})
    send_to_all(lambda: marked(run), signal.SIGSTOP)

    def state() -> str:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    wait_until(lambda: state() == "T")
    send_to_all(lambda: marked(run), signal.SIGCONT)
    wait_until(lambda: state() == "S")
    process.kill()
    close(process)


def test_the_sweeper_ends_the_run_when_its_parent_is_gone(run: str, tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    (disks / "1").mkdir(parents=True)
    command = [sys.executable, "-m", "console.local.processes", run, str(disks)]
    sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
    process = start(["sleep", "600"], run, "node-0")
    wait_until(lambda: marked(run) == {process.pid})
    assert sweeper.stdin is not None
    sweeper.stdin.close()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert sweeper.wait(PATIENCE_S) == 0
    assert not disks.exists()
    close(process)


def test_ports_that_were_given_out_are_not_chosen_again() -> None:
    given = set(free_ports(5, Random(1)))
    assert not given & set(free_ports(5, Random(1), given))


def test_free_ports_are_free_and_differ() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = free_ports(5, Random(1))
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        assert ports[0] not in free_ports(5, Random(1))


def test_a_node_that_is_told_to_end_starts_no_torchrun_again(tmp_path: Path) -> None:
    delivered = tmp_path / "env"
    start_nothing_again(delivered)
    assert not delivered.exists()
    delivered.write_text("MUSTER_MEMBER=a\nMUSTER_RESTART_STEPS=200\n")
    start_nothing_again(delivered)
    assert restart_steps(read_delivery(delivered.read_text())) == 0
