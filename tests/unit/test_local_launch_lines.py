# SPDX-License-Identifier: Apache-2.0
"""The command after ``--``, what is told to nodes, and the processes that come of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

import console
from console.local.launch_line import read_launch_line
from console.local.node import start_nothing_again
from console.local.payload import CentralLauncher, Ending, central_status, last_words
from console.local.processes import NODE_MARK, RUN_MARK, end_all, free_ports, marked, send_to_all
from console.local.settings import LocalSettings, read_delivery
from launcher_shim.pod.ranks import restart_steps
from rdzv.errors import ConfigError
from rdzv.records.policy import JobPolicy
from tests.support.waiting import wait_until


def central(command: str, nodes: int = 1, least: int = 1, most: int = 1) -> CentralLauncher:
    line = read_launch_line(command.split(), {})
    assert line.launcher.is_central
    return CentralLauncher(
        LocalSettings(
            run="r",
            namespace="n",
            job="j",
            line=line,
            nodes=nodes,
            policy=JobPolicy(least, most, gather_s=2.0),
            restarts=0,
            lease_ttl_s=10,
            grace_s=30,
            checkpoints=Path("/c"),
            access=None,
            native=False,
        )
    )


def started(launcher: CentralLauncher) -> tuple[str, ...]:
    return launcher.prepare("launcher", "uid", Path("/run"), 0).command


def options_of(command: tuple[str, ...]) -> dict[str, str]:
    """The option before each value, of what was added."""
    return dict(pairwise(command))


OF_TORCH = {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "2"}


@pytest.mark.parametrize(
    ("command", "environ", "slots", "restarts"),
    [
        ("torchrun train.py", {}, 1, None),
        ("torchrun train.py", OF_TORCH, 2, 2),
        ("torchrun --nproc-per-node=3 --max-restarts 0 train.py", OF_TORCH, 3, 0),
        ("/opt/env/bin/torchrun --nproc-per-node=2 train.py --nnodes=9", {}, 2, None),
        ("torchrun --nproc_per_node 4 train.py", {}, 4, None),
        ("torchrun --nproc 4 -r 3 -m package.train --rdzv-id=x", {}, 4, None),
        ("torchrun --max-restarts 3 train.py --standalone", {}, 1, 3),
        ("torchrun --no-python --tee 3 ./train.sh --node-rank 1", {}, 1, None),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", {}, 2, None),
        ("/usr/bin/python3.12 -u -m torch.distributed.run train.py", {}, 1, None),
        ("torchrun -- train.py --nnodes 3", {}, 1, None),
    ],
)
def test_what_each_node_runs_of_torchrun(
    command: str, environ: dict[str, str], slots: int, restarts: int | None
) -> None:
    line = read_launch_line(command.split(), environ)
    assert (line.slots, line.max_restarts) == (slots, restarts)
    assert line.command == tuple(command.split())


@pytest.mark.parametrize(
    ("command", "slots", "program"),
    [
        ("horovodrun python train.py", 1, 1),
        ("/opt/bin/horovodrun --slots-per-host 2 python train.py -np 9", 2, 1),
        ("horovodrun --slots=3 --verbose python train.py --reset-limit 1", 3, 1),
        ("horovodrun --slots 3 --blacklist-cooldown-range 1 2 python t.py", 3, 1),
        ("python -m horovod.runner.launch --gloo --log-level INFO python t.py", 1, 3),
        ("python3.11 -u -m horovod.runner.launch python t.py", 1, 4),
    ],
)
def test_what_horovodrun_is_given_stays_as_it_is(command: str, slots: int, program: int) -> None:
    line, words = read_launch_line(command.split(), {}), tuple(command.split())
    assert (line.slots, line.command, line.program) == (slots, words, program)
    full = started(central(command, 2, 1, 3))
    assert full[0].endswith(words[0])
    assert full[1:program] == words[1:program]
    assert full[len(full) - len(words) + program :] == words[program:]


def test_what_horovodrun_must_be_told_is_added() -> None:
    told = options_of(started(central("horovodrun --slots-per-host 2 python train.py", 2, 1, 3)))
    assert (told["-np"], told["--min-np"], told["--max-np"]) == ("4", "2", "6")
    assert told["--network-interface"] == "lo"
    assert told["--host-discovery-script"] == "/run/discover_hosts.sh"
    assert told["--gloo-timeout-seconds"] == "30"


@pytest.mark.parametrize(("nodes", "start"), [(1, "2"), (3, "3"), (9, "4")])
def test_the_start_is_within_min_and_max(nodes: int, start: str) -> None:
    assert options_of(started(central("horovodrun t", nodes, 2, 4)))["-np"] == start


def test_what_the_user_says_of_times_is_not_said_again() -> None:
    words = "--gloo-timeout-s 9 --elastic-timeout=5 --blacklist-cooldown-range 1 2"
    full = started(central(f"horovodrun {words} python train.py"))
    assert full[11:] == (*words.split(), "python", "train.py")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("horovodrun -np 2 python t.py", "-np cannot be given here: .*--nodes, --min, --max and"),
        ("horovodrun --num-p=2 python t.py", "--num-proc cannot"),
        ("horovodrun --verbose --min-np 2 python t.py", "--min-np cannot"),
        ("horovodrun --max-num-proc 2 python t.py", "--max-num-proc cannot"),
        ("horovodrun -H a:1,b:1 python t.py", "-H cannot be given here: .*sidecar"),
        ("horovodrun -Ha:1 python t.py", "-H cannot"),
        ("horovodrun --hostfile f python t.py", "--hostfile cannot"),
        ("horovodrun --host-discovery-script ./d.sh python t.py", "--host-discovery-script cannot"),
        ("horovodrun --network-interface eth0 python t.py", "--network-interface cannot"),
        ("horovodrun --log-level INFO -p 22 python t.py", "-p cannot be given here: no ssh"),
        ("horovodrun --mpi python t.py", "--mpi cannot be given here: .*Gloo"),
        ("horovodrun --elastic-timeout 9 --reset-limit 3 python t.py", "--reset-limit cannot"),
        ("horovodrun --slots-per-host two python t.py", "give a number"),
        ("horovodrun --slots-per-host", "give a number"),
        ("python -m horovod.runner.launch -np 2 python t.py", "-np cannot"),
        ("torchrun --nnodes=2 train.py", "--nnodes cannot be given here: .*--min and --max"),
        ("torchrun --nno 1:2 train.py", "--nnodes cannot"),
        ("python -m torch.distributed.run --nnodes=2 train.py", "--nnodes cannot"),
        ("torchrun --rdzv-backend=c10d train.py", "--rdzv-backend cannot"),
        ("torchrun --rdzv_endpoint host:1 train.py", "--rdzv-endpoint cannot"),
        ("torchrun --rdzv-id=7 train.py", "--rdzv-id cannot be given here: .*--job"),
        ("torchrun --rdzv_conf=is_host=1 train.py", "--rdzv-conf cannot"),
        ("torchrun --node_rank=0 train.py", "--node-rank cannot"),
        ("torchrun --master-addr=::1 train.py", "--master-addr cannot"),
        ("torchrun --master_port 29500 train.py", "--master-port cannot"),
        ("torchrun --stand train.py", "--standalone cannot"),
        ("torchrun --nproc-per-node=gpu train.py", "give a number"),
        ("torchrun --nproc-per-node=0 train.py", "give a number"),
        ("torchrun --nproc-per-node", "give a number"),
        ("python train.py", "python cannot be started here: write torchrun SCRIPT, because it"),
        ("python3.12 -m train", "python3.12 cannot be started here: write torchrun"),
        ("accelerate launch t.py", "accelerate cannot be started here: write torchrun"),
        ("deepspeed t.py", "deepspeed cannot be started here: write torchrun"),
        ("python -m horovod.runner.gloo_run", "python cannot be started here"),
        ("./train.sh", "no launcher"),
        ("", "no command"),
    ],
)
def test_what_is_refused_says_why_and_what_to_do_instead(command: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        read_launch_line(command.split(), {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "environ", "sentence"),
    [
        (["torchrun train.py"], {}, "remove the quotes: -- torchrun train.py"),
        (["torchrun", "t.py"], {"PET_NPROC_PER_NODE": "gpu"}, "^PET_NPROC_PER_NODE=gpu: give a"),
    ],
)
def test_what_is_wrong_besides_the_words(
    words: list[str], environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_launch_line(words, environ)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (Ending("launcher", "done", 0), 0),
        (Ending("launcher", "failed", 1), 1),
        (Ending("launcher", "killed", 137), 137),
        (None, 137),
    ],
)
def test_the_jobs_status_is_horovodruns(ending: Ending | None, status: int) -> None:
    assert central_status(ending)[0] == status


def test_horovodrun_is_never_started_again() -> None:
    launcher = central("horovodrun t")
    ends = [launcher.after("launcher", status, 0)[0] for status in (0, 1, 137)]
    assert ends == ["done", "failed", "failed"]


def test_what_workers_said_last_is_not_hidden_by_horovodruns_traceback() -> None:
    lines = ["[1]<stdout>:step 1", "[0]<stderr>:cannot train", "Process 0 exit with status code 1."]
    assert last_words([*lines, "Traceback", "RuntimeError"], 2) == lines[:2]
    assert last_words(["Traceback", "RuntimeError: no slots"], 1) == ["RuntimeError: no slots"]


def test_horovodrun_is_given_what_it_needs_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"HOME": "/home/u", "LANG": "C", "PYTHONHASHSEED": "0", "HOROVOD_LOG_LEVEL": "info"}
    for name in tuple(os.environ):
        monkeypatch.delenv(name)
    for name, value in {
        **kept,
        "AWS_SECRET_ACCESS_KEY": "x",
        "PATH": "/bin",
        "HOMELY": "y",
    }.items():
        monkeypatch.setenv(name, value)
    given = central("horovodrun t").prepare("launcher", "uid", Path("/run"), 0).environment
    assert given == {
        **kept,
        "PATH": "/run/remote-shell:/bin",
        "PYTHONUNBUFFERED": "1",
        "MUSTER_RUN_DIR": "/run",
        RUN_MARK: "r",
        NODE_MARK: "launcher",
    }


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


def close(process: subprocess.Popen[str]) -> None:
    process.wait(PATIENCE_S)
    if process.stdout is not None:
        process.stdout.close()


def test_a_node_is_its_own_processes_and_no_others(run: str) -> None:
    first = start(["sleep", "600"], run, "node-0")
    second = start(["sleep", "600"], run, "node-1")
    longer_name = start(["sleep", "600"], run, "node-10")
    wait_until(lambda: len(marked(run)) == 3, PATIENCE_S, "all have begun")
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
    wait_until(lambda: marked(run) == {orphan}, PATIENCE_S, "it is found")


def test_a_stopped_node_goes_on(run: str) -> None:
    process = start(["sleep", "600"], run, "node-0")
    wait_until(lambda: marked(run) == {process.pid}, PATIENCE_S, "it has begun")
    send_to_all(lambda: marked(run), signal.SIGSTOP)

    def state() -> str:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    wait_until(lambda: state() == "T", PATIENCE_S, "it is stopped")
    send_to_all(lambda: marked(run), signal.SIGCONT)
    wait_until(lambda: state() == "S", PATIENCE_S, "it goes on")
    process.kill()
    close(process)


def test_the_sweeper_ends_the_run_when_its_parent_is_gone(run: str, tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    (disks / "1").mkdir(parents=True)
    command = [sys.executable, "-m", "console.local.processes", run, str(disks)]
    sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
    process = start(["sleep", "600"], run, "node-0")
    wait_until(lambda: marked(run) == {process.pid}, PATIENCE_S, "it has begun")
    assert sweeper.stdin is not None
    sweeper.stdin.close()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert sweeper.wait(PATIENCE_S) == 0
    assert not disks.exists()
    close(process)


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
        others = free_ports(5, Random(1))
    assert ports[0] not in others
    given = {*ports, *others}
    assert not given & {*free_ports(5, Random(1), given)}, "what was given out is not chosen again"


def test_a_node_that_is_told_to_end_starts_no_torchrun_again(tmp_path: Path) -> None:
    delivered = tmp_path / "env"
    start_nothing_again(delivered)
    assert not delivered.exists()
    delivered.write_text("MUSTER_MEMBER=a\nMUSTER_RESTART_STEPS=200\n")
    start_nothing_again(delivered)
    assert restart_steps(read_delivery(delivered.read_text())) == 0
