# SPDX-License-Identifier: Apache-2.0
"""The agent beside the workers and the launcher's side of them: real processes, exact statuses."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from console.local.processes import NODE_MARK, RUN_MARK, end_all, marked
from launcher_shim.rundir.exec_frames import (
    ABANDON,
    ACK,
    ATTACHED,
    EXIT,
    GONE,
    REFUSED,
    START,
    STDOUT,
    Attaching,
    Decoder,
    Frame,
    encode,
    encode_attaching,
)
from tests.support.horovod.exec_programs import copy_exec
from tests.support.programs import older_pythons

HOST = "node-0.1a2b3c4d"

PATIENCE_S = 150.0
"""For a process to start, to come to its turns and to end, on cores that are shared."""

PYTHONS = [sys.executable, *older_pythons()]

_AGENT = """import sys
sys.path.insert(0, sys.argv.pop(1))
from launcher_shim.horovod.exec.server import main
sys.exit(main(sys.argv[1:]))"""


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.01)


def set_constant(module: Path, name: str, value: float) -> None:
    """Give a constant of a module another value, in the module's file."""
    text, found = re.subn(f"(?m)^{name} = .*$", f"{name} = {value}", module.read_text())
    assert found == 1
    module.write_text(text)


def command(*argv: str, local_rank: int = 0, host: str = HOST, **environ: str) -> str:
    told = {"HOROVOD_HOSTNAME": host, "HOROVOD_LOCAL_RANK": str(local_rank), **environ}
    sent = " ".join(f"{name}={quote(value)}" for name, value in told.items())
    return f"cd / > /dev/null 2>&1 ; env {sent} {' '.join(map(quote, argv))}"


CONSTANTS = {
    "MARGIN_S": "rundir/exec_frames.py",
    "LEASE_TTL_S": "rundir/exec_frames.py",
    "ABANDONED_GRACE_S": "rundir/exec_frames.py",
    "TERM_GRACE_S": "horovod/exec/session.py",
}
"""What a test may set in the programs of both containers, and the module where it stands."""


class Pods:
    """A launcher's and a worker's container; everything that runs in them bears the run's mark."""

    def __init__(self, directory: Path, python: str, **constants: float) -> None:
        self.run = uuid.uuid4().hex
        self.directory = directory
        self.workers = directory / "workers"
        self.run_dir = self.workers / HOST
        self.run_dir.mkdir(parents=True)
        copy_exec(directory)
        shim = directory / "python" / "launcher_shim"
        for name, value in constants.items():
            set_constant(shim / CONSTANTS[name], name, value)
        (directory / "bin").mkdir()
        (directory / "bin" / "python3").symlink_to(python)
        self._python = python
        self.start_agent()

    def start_agent(self) -> None:
        modules = str(self.directory / "python")
        self.agent = subprocess.Popen(
            [self._python, "-I", "-S", "-c", _AGENT, modules, HOST, str(self.run_dir)],
            env=self.environ("worker", MODE="pod", MUSTER_LEASE_TTL="1"),
            start_new_session=True,
        )
        try:
            until(self._agent_listens, "the agent listens")
        except BaseException:
            self.end()
            raise

    def restart_agent(self) -> None:
        self.agent.terminate()
        self.agent.wait(PATIENCE_S)
        (self.run_dir / "exec.sock").unlink(missing_ok=True)
        self.start_agent()

    def _agent_listens(self) -> bool:
        assert self.agent.poll() is None
        return (self.run_dir / "exec.sock").exists()

    def environ(self, node: str, **more: str) -> dict[str, str]:
        path = f"{self.directory / 'bin'}:{os.environ['PATH']}"
        return {"PATH": path, RUN_MARK: self.run, NODE_MARK: node, **more}

    def start(self, text: str, host: str = HOST) -> subprocess.Popen[bytes]:
        """Run ``text`` on ``host`` as horovodrun does, from a directory with modules in the way."""
        (self.directory / "here").mkdir(exist_ok=True)
        (self.directory / "here" / "select.py").write_text("raise SystemExit(0)\n")
        return subprocess.Popen(
            [str(self.directory / "kubexec.sh"), host, text],
            cwd=self.directory / "here",
            env=self.environ("launcher", MUSTER_WORKERS_DIR=str(self.workers)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def ended(self, text: str, host: str = HOST) -> tuple[int, bytes, bytes]:
        """Run ``text`` to its end; its status and its output."""
        with self.start(text, host) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def on_worker(self) -> set[int]:
        """Processes of the worker's container but the agent."""
        return marked(self.run, "worker") - {self.agent.pid}

    def connect(self, sent: bytes) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE_S)
        connection.connect(str(self.run_dir / "exec.sock"))
        connection.sendall(sent)
        return connection

    def answers(self, sent: bytes) -> list[Frame]:
        with self.connect(sent) as connection:
            return frames_of(connection)

    def end(self) -> None:
        end_all(lambda: marked(self.run), set(), time.monotonic() + PATIENCE_S)
        self.agent.wait(PATIENCE_S)


@pytest.fixture
def constants() -> dict[str, float]:
    """Without a sidecar nobody says that the launcher's side is gone; it is soon taken for it."""
    return {"MARGIN_S": 3}


@pytest.fixture(params=PYTHONS, ids=lambda python: Path(python).name)
def pods(request: pytest.FixtureRequest, constants: dict[str, float]) -> Iterator[Pods]:
    # A short path: that of a unix socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="pods-") as directory:
        pods = Pods(Path(directory), request.param, **constants)
        yield pods
        pods.end()


about_ending_well = pytest.mark.parametrize(
    "constants", [{"MARGIN_S": 61, "ABANDONED_GRACE_S": 60.0, "TERM_GRACE_S": 60.0}], ids=["grace"]
)
"""The worker is not killed before a busy machine lets it do as it is told."""

about_patience = pytest.mark.parametrize("constants", [{"MARGIN_S": 600}], ids=["patient"])
"""A connection that is cut is no end, however busy the machine."""

IMPATIENT = {"LEASE_TTL_S": 0, "MARGIN_S": 1}
about_no_way = pytest.mark.parametrize("constants", [IMPATIENT], ids=["impatient"])

SESSION = "0123456789abcdef" * 2


def attaching(attempt: int = 1, *, received: int = 0, acknowledged: int = 0) -> bytes:
    return encode_attaching(Attaching(HOST, SESSION, attempt, acknowledged, received))


def starting(text: str) -> bytes:
    return encode(START, text.encode(), 1)


def frames_of(connection: socket.socket) -> list[Frame]:
    """Everything that counts of what the agent sends until it closes; all of it is acknowledged."""
    decoder, frames = Decoder(), []
    # It may close before it has read the last acknowledgement.
    with suppress(ConnectionResetError):
        while data := connection.recv(65536):
            came = [frame for frame in decoder.feed(data) if frame.kind not in (ACK, ATTACHED)]
            frames += came
            for frame in came:
                with suppress(BrokenPipeError):
                    connection.sendall(encode(ACK, number=frame.number) if frame.number else b"")
    return frames


SLEEP = ("sh", "-c", "echo up; exec sleep 1000")
STUBBORN = ("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done")

one_python_is_enough = pytest.mark.parametrize("pods", PYTHONS[:1], indirect=True, ids=["python"])


def sleeper(pods: Pods, *argv: str, local_rank: int = 0) -> subprocess.Popen[bytes]:
    process = pods.start(command(*(argv or SLEEP), local_rank=local_rank))
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("exit 255", 255),
        ("kill -KILL $$", 137),
        ("kill -ABRT $$", 134),
        ("kill -TERM $$", 143),
        # What it leaves behind ends with it; a pipe held from another session only delays the end.
        ("sleep 1000 & exit 3", 3),
        ("setsid sleep 1000 & exit 3", 3),
    ],
)
def test_the_status_is_the_workers_own(pods: Pods, script: str, status: int) -> None:
    assert pods.ended(command("sh", "-c", f"ulimit -c 0; {script}")) == (status, b"", b"")
    if "setsid" not in script:
        until(lambda: not pods.on_worker(), "nothing is left")


def test_streams_stay_apart_and_whole(pods: Pods) -> None:
    script = "head -c 3000000 /dev/zero; echo end >&2; exec >&-; echo after >&2; exit 7"
    assert pods.ended(command("sh", "-c", script)) == (7, bytes(3000000), b"end\nafter\n")


def test_the_worker_has_its_pods_environment_and_what_horovod_tells(pods: Pods) -> None:
    script = "echo $MODE $HOROVOD_RANK $SEED $MUSTER_MEMBER $PWD $PYTHONPATH"
    argv = ("sh", "-c", script)
    text = command(*argv, MODE="launcher", HOROVOD_RANK="5", SEED="7", MUSTER_MEMBER="launcher")
    assert pods.ended(text)[1] == b"pod 5 7 worker /\n"


def test_a_program_that_is_not_there_is_no_unknown_end(pods: Pods) -> None:
    status, _, err = pods.ended(command("no-such-program"))
    assert (status, b"no-such-program" in err) == (127, True)


@pytest.mark.parametrize("host", ["node-0.ffffffff", "node-9.00000000"])
def test_a_pod_of_another_life_starts_nothing(pods: Pods, host: str) -> None:
    if host.startswith("node-0"):
        (pods.workers / host).symlink_to(pods.run_dir)
    status, _, _ = pods.ended(command("touch", str(pods.directory / "ran"), host=host), host)
    assert status == (126 if host.startswith("node-0") else 255)
    assert not (pods.directory / "ran").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_ends_the_launchers_side_ends_the_worker(pods: Pods, number: signal.Signals) -> None:
    worker = sleeper(pods, *STUBBORN)
    worker.send_signal(number)
    worker.wait(PATIENCE_S)
    until(lambda: not pods.on_worker(), "the worker ends")
    assert worker.returncode == -number
    worker.communicate()


@about_ending_well
def test_the_worker_may_end_well_when_it_is_told_to(pods: Pods) -> None:
    script = f"trap 'touch {pods.directory}/ended; exit' TERM; echo up; while :; do sleep 0.1; done"
    worker = sleeper(pods, "sh", "-c", script)
    worker.kill()
    worker.communicate()
    until((pods.directory / "ended").exists, "the worker ends by itself")
    until(lambda: not pods.on_worker(), "the worker has ended")


@about_no_way
def test_an_agent_that_is_killed_is_no_success(pods: Pods) -> None:
    worker = sleeper(pods)
    pods.agent.kill()
    _, err = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == 255
    assert b"not known" in err


@one_python_is_enough
@about_ending_well
def test_a_worker_that_ends_well_because_it_is_ended_is_no_success(pods: Pods) -> None:
    script = "trap 'exit 0' TERM; echo up; while :; do sleep 0.1; done"
    first = sleeper(pods, "sh", "-c", script)
    second = sleeper(pods, "sh", "-c", script)  # in the slot of the first
    first.communicate(timeout=PATIENCE_S)
    pods.agent.terminate()
    second.communicate(timeout=PATIENCE_S)
    assert (first.returncode, second.returncode) == (143, 143)
    assert pods.agent.wait(PATIENCE_S) == 143
    assert not pods.on_worker()


@one_python_is_enough
@about_ending_well
def test_a_command_that_waits_for_its_slot_is_not_started_by_an_agent_that_ends(pods: Pods) -> None:
    may_end, started = pods.directory / "may-end", pods.directory / "started"
    script = f"trap 'echo told' TERM; echo up; while ! [ -e {may_end} ]; do sleep 0.1; done"
    first = sleeper(pods, "sh", "-c", script)
    second = pods.start(command("touch", str(started)))
    assert first.stdout is not None
    assert first.stdout.readline() == b"told\n"  # because of the second
    pods.agent.terminate()
    until(lambda: _refuses(pods), "the agent takes no connection any more")
    may_end.touch()
    first.communicate(timeout=PATIENCE_S)
    _, err = second.communicate(timeout=PATIENCE_S)
    assert pods.agent.wait(PATIENCE_S) == 143
    assert not started.exists()
    assert (second.returncode, b"is about to leave" in err) == (126, True)


def _refuses(pods: Pods) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(pods.run_dir / "exec.sock")) == errno.ECONNREFUSED


@one_python_is_enough
def test_a_directory_in_the_place_of_a_note_keeps_no_agent_from_its_work(pods: Pods) -> None:
    pods.agent.terminate()
    pods.agent.wait(PATIENCE_S)
    (pods.run_dir / "exec.sock").unlink(missing_ok=True)
    notes = pods.run_dir / "workers"
    (notes / "0.json").mkdir()
    (notes / "1.json").touch()
    pods.start_agent()
    assert not (notes / "1.json").exists()
    for program, status in (("true", 0), ("no-such-program", 127)):
        assert pods.ended(command(program))[0] == status
    assert pods.agent.poll() is None


@one_python_is_enough
def test_a_note_that_is_gone_keeps_no_slot(pods: Pods) -> None:
    first = sleeper(pods)
    (pods.run_dir / "workers" / "0.json").unlink()
    second = sleeper(pods)
    first.communicate(timeout=PATIENCE_S)
    assert (first.returncode, second.poll()) == (143, None)
    second.kill()
    second.communicate()


@one_python_is_enough
def test_a_command_that_cannot_be_noted_is_refused_and_why_is_said(pods: Pods) -> None:
    (pods.run_dir / "workers").rmdir()
    status, _, err = pods.ended(command(*SLEEP))
    assert (status, b"workers" in err) == (126, True)
    assert not pods.on_worker()


def test_one_command_a_slot(pods: Pods) -> None:
    first, other = sleeper(pods), sleeper(pods, local_rank=1)
    second = sleeper(pods)
    first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 143
    assert (second.poll(), other.poll()) == (None, None)
    for worker in (second, other):
        worker.kill()
        worker.communicate()
    until(lambda: not pods.on_worker(), "the workers end")


@one_python_is_enough
@about_patience
def test_a_launcher_that_does_not_read_loses_neither_worker_nor_output(pods: Pods) -> None:
    lines = 1_000_000
    with pods.start(
        command("sh", "-c", f"seq {lines}; touch {pods.directory}/done; exit 4")
    ) as worker:
        try:
            until(pods.on_worker, "the worker runs")
            assert worker.poll() is None
            assert not (pods.directory / "done").exists()
            out, err = worker.communicate(timeout=PATIENCE_S)
        finally:
            worker.kill()
    assert (worker.returncode, err) == (4, b"")
    assert out == b"".join(b"%d\n" % number for number in range(1, lines + 1))


@one_python_is_enough
@about_patience
def test_a_command_outlives_its_connection_and_nothing_it_says_is_lost(pods: Pods) -> None:
    go = pods.directory / "go"
    script = f"echo one; while ! [ -e {go} ]; do sleep 0.05; done; echo two; exit 6"
    with pods.connect(attaching() + starting(command("sh", "-c", script))) as first:
        decoder = Decoder()
        came: list[Frame] = []
        while not [frame for frame in came if frame.kind == STDOUT]:
            came += decoder.feed(first.recv(65536))
    assert came[-1] == Frame(STDOUT, b"one\n", 1)
    go.touch()
    # It has not been acknowledged, so it comes again; the START does not count twice.
    frames = pods.answers(attaching(2, acknowledged=1) + starting(command("false")))
    assert frames == [Frame(STDOUT, b"one\n", 1), Frame(STDOUT, b"two\n", 2), Frame(EXIT, b"6", 3)]


@one_python_is_enough
@about_patience
def test_a_command_that_is_abandoned_is_ended(pods: Pods) -> None:
    with pods.connect(attaching() + starting(command(*STUBBORN))) as connection:
        until(pods.on_worker, "the worker runs")
        with pods.connect(encode_attaching(Attaching(HOST, SESSION), ABANDON)) as other:
            assert other.recv(100) == encode(ACK)
        assert [frame.kind for frame in frames_of(connection)][-1] == GONE
    until(lambda: not pods.on_worker(), "the worker ends")


UNKNOWN = b"the agent beside the worker knows no such command any more"


@pytest.mark.parametrize(
    ("sent", "answered", "said"),
    [
        # What an agent before this one ran is not run again.
        (attaching(2, acknowledged=1), GONE, UNKNOWN),
        (b"GET / HTTP/1.1\r\n\r\n", GONE, b"there is no frame of kind 47"),
        (encode(STDOUT, b"x"), GONE, b"the first frame is of kind 3, and attaches to nothing"),
        (attaching() + encode(STDOUT, b"x", 1), GONE, b"a frame of kind 3 cannot be told an agent"),
        (attaching() + encode(START, b"x", 2), GONE, b"frame 2 came where 1 was to come"),
        (
            attaching() + starting("reboot"),
            REFUSED,
            b"the command does not begin with cd DIRECTORY",
        ),
        (
            encode_attaching(Attaching("node-1.00000000", SESSION, 1)) + starting(command("true")),
            REFUSED,
            b"this is host node-0.1a2b3c4d, not node-1.00000000",
        ),
        (
            attaching() + starting(command("true", host="node-1.00000000")),
            REFUSED,
            b"this is host node-0.1a2b3c4d, not node-1.00000000",
        ),
    ],
)
def test_i8_what_cannot_be_begun_is_refused_and_the_agent_goes_on(
    pods: Pods, sent: bytes, answered: int, said: bytes
) -> None:
    (frame,) = pods.answers(sent)
    assert frame.kind == answered
    assert said in frame.body
    until(lambda: not pods.on_worker(), "nothing runs")
    well = pods.answers(attaching(9) + starting(command("sh", "-c", "exit 5")))
    assert well == [Frame(EXIT, b"5", 1)]


def test_i8_nonsense_after_the_start_ends_the_worker(pods: Pods) -> None:
    with pods.connect(attaching() + starting(command(*SLEEP))) as connection:
        until(pods.on_worker, "the worker runs")
        connection.sendall(b"nonsense" * 9)
        frames_of(connection)
    until(lambda: not pods.on_worker(), "the worker ends")


TORCH = """
import os
with open(os.environ["IMPORTS"], "a") as file:
    file.write("imported by %s\\n" % open("/proc/self/cmdline").read().split("\\0")[0])
"""


@pytest.fixture
def warm_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pods]:
    """Pods whose workers start warm; what the zygote imports as torch notes each import."""
    for name in ("torch", "torch/distributed"):
        (tmp_path / "site-packages" / name).mkdir(parents=True)
        (tmp_path / "site-packages" / name / "__init__.py").write_text("")
    (tmp_path / "site-packages/torch/__init__.py").write_text(TORCH)
    settings = {
        "MUSTER_WARM": "1",
        "PYTHONPATH": str(tmp_path / "site-packages"),
        "IMPORTS": str(tmp_path / "imports"),
        "MUSTER_RUN_DIR": str(tmp_path / "pods/workers" / HOST),
    }
    of_pods = Pods.environ

    def environ(self: Pods, node: str, **more: str) -> dict[str, str]:
        return of_pods(self, node, **more, **(settings if node == "worker" else {}))

    monkeypatch.setattr(Pods, "environ", environ)
    pods = Pods(tmp_path / "pods", sys.executable)
    try:
        yield pods
    finally:
        pods.end()


def test_workers_that_start_warm_import_torch_once_and_end_as_others_do(
    warm_pods: Pods, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "print(os.environ['HOROVOD_RANK'], os.environ['HOROVOD_LOCAL_RANK'], sys.argv)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    for rank in ("0", "1", "2"):
        sent: Any = {"HOROVOD_RANK": rank, "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        text = command(sys.executable, str(script), rank, **sent)
        said = f"{rank} 0 {[str(script), rank]}\n"
        assert warm_pods.ended(text) == (int(rank), said.encode(), b"")
    assert (tmp_path / "imports").read_text().count("imported") == 1
    other = command(
        sys.executable, str(script), "0", HOROVOD_RANK="3", OTHER="1", PYTHONUNBUFFERED="1"
    )
    _, _, err = warm_pods.ended(other)
    assert b"without the zygote: its environment differs from the zygote's in OTHER" in err
    assert (tmp_path / "imports").read_text().count("imported") == 2


def test_a_warm_worker_leaves_no_process_and_ends_with_its_command(
    warm_pods: Pods, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, time\nsubprocess.Popen(['sleep', '1000'])\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000 if len(sys.argv) > 1 else 0)\n"
    )
    before = warm_pods.on_worker()
    sent: Any = {"HOROVOD_RANK": "0", "PYTHONUNBUFFERED": "1"}
    assert warm_pods.ended(command(sys.executable, str(script), **sent))[0] == 0
    until(lambda: warm_pods.on_worker() == before, "nothing of it is left")
    with warm_pods.start(command(sys.executable, str(script), "long", **sent)) as lives:
        assert lives.stdout is not None
        assert lives.stdout.readline() == b"ready\n"
        lives.kill()
    until(lambda: warm_pods.on_worker() == before, "it ends with its launcher's side")


SLOW_TO_DIE = """
import os, signal, sys, time
def die(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    time.sleep(int(sys.argv[1]))
    os._exit(1)
signal.signal(signal.SIGUSR1, die)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while True: time.sleep(1)
"""
AFTER_IT = """
import os, sys
print(os.path.exists("/proc/" + sys.argv[1]), "muster_stub" in sys.__dict__)
"""


def after_one_slow_to_die(pods: Pods, takes_s: int, program: str, **constants: float) -> bytes:
    """Start a worker, and another in its slot; return what the other says of the first.

    The signal with which the zygote kills is one that a process can be slow to obey.
    """
    shim = pods.directory / "python/launcher_shim"
    set_constant(shim / "warm/zygote.py", "KILL", int(signal.SIGUSR1))
    set_constant(shim / "horovod/exec/session.py", "TERM_GRACE_S", 0.5)
    for name, value in constants.items():
        set_constant(shim / "warm/stub.py", name, value)
    pods.restart_agent()
    slow, following = pods.directory / "slow.py", pods.directory / "next.py"
    slow.write_text(SLOW_TO_DIE)
    following.write_text(AFTER_IT)
    sent: Any = {"HOROVOD_RANK": "0", "PYTHONUNBUFFERED": "1"}
    with pods.start(command(sys.executable, str(slow), str(takes_s), **sent)) as first:
        assert first.stdout is not None
        pid = first.stdout.readline().decode().strip()
        _, out, _ = pods.ended(command(program, str(following), pid, **sent))
        first.communicate(timeout=PATIENCE_S)
    return out


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "plain"])
def test_the_next_worker_of_a_slot_starts_after_the_end_of_a_warm_one_that_is_slow_to_die(
    warm_pods: Pods, warm: bool
) -> None:
    other = warm_pods.directory / "other-python"
    other.symlink_to(sys.executable)
    program = sys.executable if warm else str(other)
    assert after_one_slow_to_die(warm_pods, 4, program) == f"False {warm}\n".encode()


def test_a_warm_worker_that_does_not_die_keeps_its_slot_for_a_time_and_the_log_says_so(
    warm_pods: Pods, capfd: pytest.CaptureFixture[str]
) -> None:
    said = after_one_slow_to_die(warm_pods, 1000, sys.executable, DEATH_TIMEOUT_S=1.0)
    assert said == b"True True\n"
    assert "has not ended 1 s after SIGKILL" in capfd.readouterr().err
