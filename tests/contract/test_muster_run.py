# SPDX-License-Identifier: Apache-2.0
"""``muster-run`` and ``muster-hold`` as they are delivered, with and without a sidecar."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agent.rundir.programs import PROGRAMS
from launcher_shim.pod.hold import reserve_s
from tests.support.sidecars.notices import NoticeServer, notice_server
from tests.support.sidecars.pod_programs import Started, deliver, started
from tests.support.sidecars.processes import PATIENCE_S, until

HEAVY = {"argparse", "email", "http", "importlib.metadata", "multiprocessing", "site", "urllib"}
"""What Python takes long to import, and a first process of a container has no use for."""

TELLTALE = """
import os, signal, sys, time
def tell(number, frame):
    os.write(1, b"got %d\\n" % number)
    if number == signal.SIGTERM:
        sys.exit(int(sys.argv[1]))
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, tell)
os.write(1, b"ready\\n")
while True:
    time.sleep(0.05)
"""
"""A command that says which signals reach it, and ends by SIGTERM with the status it is given.

It writes by itself, as no print may come in the middle of another one.
"""

GRACE_S = 600.0
"""A hold of that long does not end by itself within a test."""
GRACE = {"MUSTER_GRACE_S": f"{GRACE_S:g}"}

each_end = pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP], ids=lambda n: n.name
)

CAP_KILL, PR_CAPBSET_DROP = 5, 24
WITHOUT_CAP_KILL = f"""#!{sys.executable}
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {CAP_KILL}, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command as a root that may signal no process of another user, as in many a container."""
DAEMON = """
import os, subprocess, sys, time
what = sys.argv[1]
drop = "import os, time; os.setuid(65534); print(os.getpid(), flush=True); time.sleep(600)"
if what == "the command":
    os.execv(sys.executable, [sys.executable, "-c", drop])
daemon = subprocess.Popen(
    [sys.executable, "-c", drop],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    start_new_session=what == "a daemon",
)
print(daemon.stdout.readline().decode(), end="", flush=True)
if what == "in its group":
    time.sleep(600)
sys.exit(3)
"""
"""A command that leaves a process of another user, or is one, and says that one's number."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory as the sidecar delivers it, as far as these programs look at it."""
    path = tmp_path / "run"
    (path / "bin").mkdir(parents=True)
    (path / "env").write_text("MUSTER_MEMBER=node-0\nDELIVERED=a=b\n")
    deliver(path)
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The programs alone, without a sidecar."""
    path = tmp_path / "bare"
    (path / "bin").mkdir(parents=True)
    deliver(path)
    return path


def on_path(folder: Path, name: str, script: str) -> str:
    """Put a program in the place of the one of that name; return the PATH that begins with it."""
    folder.mkdir()
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def telltale(status: int) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", TELLTALE, str(status))


# --- a plain init ---


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -KILL $$", 137),
        ("kill -ABRT $$", 134),
        ("(sleep 600 &) ; exit 3", 3),
    ],
)
async def test_it_ends_as_its_command_does(bare: Path, command: str, status: int) -> None:
    async with started(bare, "muster-run", "--", "sh", "-c", command) as run:
        assert await run.ended() == status


@pytest.mark.parametrize(
    ("arguments", "status"),
    [((), 2), (("--",), 2), (("--wrong",), 2), (("--", "no-such-command"), 127), (("/etc",), 126)],
)
async def test_what_cannot_be_run_is_said(
    bare: Path, arguments: tuple[str, ...], status: int
) -> None:
    async with started(bare, "muster-run", *arguments) as run:
        assert await run.ended() == status
        assert len(run.err.splitlines()) == 1


async def test_it_leaves_nothing_behind_and_reaps_what_is_not_its_own(bare: Path) -> None:
    mark = f"left-{os.getpid()}-{time.monotonic_ns()}"
    command = f"setsid sh -c 'sleep 600; : {mark}' & sh -c 'true & exec true'; exit 4"
    async with started(bare, "muster-run", "--", "sh", "-c", command) as run:
        assert await run.ended() == 4

    def found() -> list[str]:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            lines += [line] if mark in line else []
        return lines

    async def none_left() -> bool:
        return not await asyncio.to_thread(found)

    # What was not killed sleeps on; what was may take a moment to be gone.
    await until(none_left)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("a daemon", 3),
        ("in its group", 128 + signal.SIGTERM),
        ("the command", 128 + signal.SIGKILL),
    ],
)
async def test_a_process_of_another_user_changes_no_status(
    bare: Path, what: str, status: int
) -> None:
    path = bare / "bin" / "without-cap-kill"
    await asyncio.to_thread(path.write_text, WITHOUT_CAP_KILL)
    await asyncio.to_thread(path.chmod, 0o755)
    command = (str(bare / "bin" / "muster-run"), "--", sys.executable, "-c", DAEMON, what)
    async with started(bare, path.name, *command) as run:
        pid = int(await run.line())
        try:
            if what != "a daemon":
                run.process.send_signal(signal.SIGTERM)
            if what == "the command":
                said = await run.complaint()
                assert said == "muster-run: SIGTERM reaches nothing of the command: not permitted"
                os.kill(pid, signal.SIGKILL)
            assert await run.ended() == status
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert "Traceback" not in run.err


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
async def test_every_signal_reaches_the_command(bare: Path, number: signal.Signals) -> None:
    async with started(bare, "muster-run", *telltale(5)) as run:
        await run.said("ready")
        run.process.send_signal(number)
        await run.said(f"got {number}")
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended() == 5
        assert run.out.count("got 15") == 1


@pytest.mark.parametrize("line", ["{}", "{}; echo after", "{} & wait"])
async def test_a_sigterm_that_a_shell_would_swallow_arrives_once(bare: Path, line: str) -> None:
    telling = f"{sys.executable} -c '{TELLTALE}' 5"
    async with started(bare, "muster-run", "--", "sh", "-c", line.format(telling)) as run:
        await run.said("ready")
        run.process.send_signal(signal.SIGTERM)
        status = await run.ended()
        assert run.out.count("got 15") == 1
        assert status in (5, 143)


async def test_it_imports_nothing_that_is_heavy(bare: Path, tmp_path: Path) -> None:
    telling = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -X importtime "$@"\n'
    path = await asyncio.to_thread(on_path, tmp_path / "path", "python3", telling)
    async with started(bare, "muster-run", "--", "true", PATH=path) as run:
        assert await run.ended() == 0
    lines = [line for line in run.err.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip() for line in lines[1:]}
    assert "launcher_shim.pod.run" in imported
    assert imported.isdisjoint(HEAVY)
    packages = {name.partition(".")[0] for name in imported}
    assert packages - sys.stdlib_module_names == {"launcher_shim"}


# --- beside a sidecar ---


async def test_what_is_delivered_wins_but_for_the_restart_budget_and_foreign_options(
    run_dir: Path,
) -> None:
    delivered = "PET_RDZV_ENDPOINT=elsewhere:1\nPET_MAX_RESTARTS=10\nPET_RDZV_CONF=is_host=0\n"
    await asyncio.to_thread((run_dir / "env").write_text, f"{delivered}DELIVERED=a=b\n")
    of_torchrun = "echo $PET_RDZV_ENDPOINT $PET_MAX_RESTARTS $PET_RDZV_CONF"
    others = "echo $DELIVERED $PYTHONPATH $MUSTER_RUN_DIR $KEPT"
    async with started(
        run_dir,
        *("muster-run", "--", "sh", "-c", f"{of_torchrun}; {others}"),
        PET_RDZV_ENDPOINT="worker-0:23456",
        PET_MAX_RESTARTS="1",
        PET_RDZV_CONF="join_timeout=900,is_host=1",
        PYTHONPATH="/mine",
        KEPT="kept",
    ) as run:
        assert await run.ended() == 0
        assert run.out == [
            "elsewhere:1 1 is_host=0,join_timeout=900",
            f"a=b {run_dir}/python:/mine {run_dir} kept",
        ]
        said = [line for line in run.err.splitlines() if "overruled" in line]
        assert said == [
            "muster-run: PET_RDZV_ENDPOINT: worker-0:23456 is overruled by elsewhere:1",
            "muster-run: PET_RDZV_CONF: is_host=1 is overruled by is_host=0,join_timeout=900",
        ]


async def test_it_finds_its_run_directory_through_a_link(run_dir: Path, tmp_path: Path) -> None:
    linked = tmp_path / "usr"
    await asyncio.to_thread(linked.mkdir)
    await asyncio.to_thread((linked / "bin").symlink_to, run_dir / "bin")
    async with started(linked, "muster-run", "--", "sh", "-c", "echo $MUSTER_RUN_DIR") as run:
        assert await run.ended() == 0
        assert run.out == [str(run_dir)]


@pytest.mark.parametrize(("sidecars", "status"), [("0", 2), ("{port}", 7), (None, 7)])
async def test_a_port_that_somebody_else_serves_is_said(
    run_dir: Path, sidecars: str | None, status: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = f"PET_RDZV_ENDPOINT=localhost:{port}\n"
        if sidecars is not None:
            lines += f"MUSTER_C10D_PORT={sidecars.format(port=port)}\n"
        await asyncio.to_thread((run_dir / "env").write_text, lines)
        async with started(run_dir, "muster-run", "--", "sh", "-c", "exit 7") as run:
            assert await run.ended() == status
    (line,) = run.err.splitlines()
    assert f"port {port} " in line


async def test_it_waits_for_a_sidecar_that_has_yet_to_deliver(run_dir: Path) -> None:
    env = run_dir / "env"
    aside = run_dir / "env.nascent"
    await asyncio.to_thread(env.rename, aside)
    async with started(
        run_dir, "muster-run", "--", "sh", "-c", "echo $DELIVERED", MUSTER_RUN_DIR=str(run_dir)
    ) as run:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await run.process.wait()
        await asyncio.to_thread(aside.rename, env)  # as the sidecar delivers it: in one piece
        assert await run.ended() == 0
        assert run.out == ["a=b"]


SLOW_TO_START = """#!{python}
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
open({started!r}, "w").close()
while not os.path.exists({go!r}):
    time.sleep(0.01)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Stands for a Python that takes its time before it looks at the program. No shell: dash forgets
which signals are blocked."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_signal_before_python_has_started_is_not_lost(
    bare: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    started_, go = tmp_path / "started", tmp_path / "go"
    script = SLOW_TO_START.format(started=str(started_), go=str(go), python=sys.executable)
    path = await asyncio.to_thread(on_path, tmp_path / "path", "python3", script)
    command = ("--", "sleep", "600") if name == "muster-run" else ()
    async with started(bare, name, *command, PATH=path) as run:
        await until(lambda: asyncio.to_thread(started_.exists))
        run.process.send_signal(number)
        await asyncio.to_thread(go.touch)
        status = await run.ended()
    assert status == (128 + number if name == "muster-run" else -number)


@each_end
async def test_a_signal_while_the_shell_looks_for_python_is_handled(
    bare: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """As the first process of a container it would get none that it has no handler for."""
    started_, go = tmp_path / "started", tmp_path / "go"
    script = f"#!/bin/sh\ntouch {started_}\nuntil [ -e {go} ]; do sleep 0.01; done\nexit 125\n"
    path = await asyncio.to_thread(on_path, tmp_path / "path", "env", script)
    async with started(bare, "muster-run", "--", "sleep", "600", PATH=path) as run:
        await until(lambda: asyncio.to_thread(started_.exists))
        run.process.send_signal(number)
        await asyncio.to_thread(go.touch)
        assert await run.ended() == 128 + number


async def test_an_env_that_can_block_nothing_is_done_without(bare: Path, tmp_path: Path) -> None:
    path = await asyncio.to_thread(on_path, tmp_path / "path", "env", "#!/bin/sh\nexit 125\n")
    async with started(bare, "muster-run", "--", "sh", "-c", "exit 7", PATH=path) as run:
        assert await run.ended() == 7


async def test_its_command_starts_with_no_signal_blocked(bare: Path) -> None:
    line = "grep SigBlk: /proc/self/status"
    async with started(bare, "muster-run", "--", "sh", "-c", line) as run:
        assert await run.ended() == 0
    assert run.out == ["SigBlk:\t0000000000000000"]


async def handles_signals(pid: int) -> bool:
    status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return all(caught >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGRTMAX))


@each_end
async def test_a_signal_before_the_command_was_started_ends_it(
    run_dir: Path, number: signal.Signals
) -> None:
    await asyncio.to_thread((run_dir / "env").unlink)
    async with started(run_dir, "muster-run", *telltale(0), MUSTER_RUN_DIR=str(run_dir)) as run:
        await until(lambda: handles_signals(run.process.pid))
        run.process.send_signal(number)
        assert await run.ended() == 128 + number
        assert run.out == []
        assert f"{number.name} came before the command was started" in run.err


@asynccontextmanager
async def held(
    run_dir: Path, status: int = 0, before: Sequence[str] = ()
) -> AsyncIterator[tuple[Started, NoticeServer]]:
    """A command, after words ``before``, whose SIGTERM is held by a sidecar."""
    dashes, *telling = telltale(status)
    command = (dashes, *before, *telling)
    async with (
        notice_server(run_dir) as server,
        started(run_dir, "muster-run", *command, **GRACE) as run,
    ):
        await run.said("ready")
        run.process.send_signal(signal.SIGTERM)
        await server.came()
        yield run, server


async def unheard(run: Started) -> bool:
    """Whether SIGTERM has not reached the command: it hears SIGUSR1, which was sent later."""
    run.process.send_signal(signal.SIGUSR1)
    await run.said(f"got {signal.SIGUSR1}")
    return "got 15" not in run.out


@pytest.mark.parametrize(
    ("outcome", "status", "shown"),
    [
        ("committed", 0, 143),
        ("committed", 1, 143),
        ("uncommitted", 143, 143),
        ("expired", 0, 143),
        ("committed", 134, 134),
    ],
)
async def test_a_sigterm_is_held_until_the_drain_is_over(
    run_dir: Path, outcome: str, status: int, shown: int
) -> None:
    async with held(run_dir, status) as (run, server):
        (notice,) = server.notices
        assert notice["notice"] == "sigterm"
        assert GRACE_S - PATIENCE_S < notice["seconds_left"] <= GRACE_S
        server.say("draining", "all ranks save at step 7")
        assert await unheard(run)
        server.say("released", "every rank has saved", outcome=outcome)
        assert await run.ended() == shown
        assert run.out.count("got 15") == 1
        assert "all ranks save at step 7" in run.err


@pytest.fixture
def torchrun(tmp_path: Path) -> str:
    """A program of that name, which runs what follows it."""
    path = tmp_path / "torchrun"
    path.write_text('#!/bin/sh\nexec "$@"\n')
    path.chmod(0o755)
    return str(path)


SAID = "the traceback above is how torchrun ends"
DRAINED = {"outcome": "committed", "step": 45}


@pytest.mark.parametrize(
    ("status", "by_torchrun", "fields", "said"),
    [
        (1, True, DRAINED, f"drained at step 45; {SAID}"),
        (1, True, {"outcome": "uncommitted"}, f"drained; {SAID}"),
        (0, True, DRAINED, None),
        (134, True, DRAINED, None),
        (1, False, DRAINED, None),
    ],
)
async def test_a_drained_torchrun_ends_like_any_other_and_its_traceback_is_explained(
    run_dir: Path,
    torchrun: str,
    status: int,
    by_torchrun: bool,
    fields: dict[str, Any],
    said: str | None,
) -> None:
    async with held(run_dir, status, before=[torchrun] * by_torchrun) as (run, server):
        server.say("released", **fields)
        assert await run.ended() == 143
    last = run.err.splitlines()[-1]
    assert (last == f"muster-run: {said}") if said else SAID not in run.err


async def test_no_traceback_is_explained_without_a_drain(run_dir: Path, torchrun: str) -> None:
    async with started(run_dir, "muster-run", "--", torchrun, "sh", "-c", "exit 1") as run:
        assert await run.ended() == 1
    assert SAID not in run.err


async def test_text_of_another_pod_stays_one_line_and_steers_no_terminal(run_dir: Path) -> None:
    async with held(run_dir) as (run, server):
        server.say("draining", "n2 could not save: x\nmuster-run: forged \x1b[31mred")
        server.say("released", outcome="committed")
        assert await run.ended() == 143
    (line,) = [line for line in run.err.splitlines() if "could not save" in line]
    assert line.endswith("x\\nmuster-run: forged \\x1b[31mred")
    assert "\x1b" not in run.err


async def test_more_sigterms_change_nothing(run_dir: Path) -> None:
    async with held(run_dir) as (run, server):
        for _ in range(3):
            run.process.send_signal(signal.SIGTERM)
        assert await unheard(run)
        assert len(server.notices) == 1
        server.say("released", outcome="committed")
        assert await run.ended() == 143


async def test_a_sidecar_that_dies_is_told_again_when_it_is_back(run_dir: Path) -> None:
    async with held(run_dir) as (run, server):
        await server.die()
        assert await unheard(run)
        await server.listen()
        await server.came(2)
        assert server.notices[1]["seconds_left"] < server.notices[0]["seconds_left"]
        server.say("released", outcome="committed")
        assert await run.ended() == 143


@pytest.mark.parametrize("dies", [True, False])
async def test_the_end_of_the_grace_is_kept_whatever_the_sidecar_does(
    run_dir: Path, *, dies: bool
) -> None:
    # How much of it is kept in reserve is a table of tests/unit.
    async with (
        notice_server(run_dir) as server,
        started(run_dir, "muster-run", *telltale(0), MUSTER_GRACE_S="15") as run,
    ):
        await run.said("ready")
        sent_s = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        await server.came()
        if dies:
            await server.die()
        await run.said("got 15")
        assert time.monotonic() - sent_s >= 15 - reserve_s(15)
        assert await run.ended() == 143


async def test_a_cancelled_drain_lets_the_command_go_on_and_a_later_one_begins_anew(
    run_dir: Path,
) -> None:
    async with held(run_dir) as (run, server):
        server.say("cancelled", "the operator took it back")
        await until(lambda: all(client.is_closing() for client in server.clients))
        assert await unheard(run)
        run.process.send_signal(signal.SIGTERM)
        await server.came(2)
        server.clients.pop(0)
        server.say("released", outcome="committed")
        assert await run.ended() == 143
        assert "the operator took it back" in run.err


@pytest.mark.parametrize(("finishing", "status"), [(False, 9), (True, 0)])
async def test_a_command_that_ends_by_itself_while_it_is_held_keeps_its_status(
    run_dir: Path, finishing: bool, status: int
) -> None:
    """As the job is finishing its sidecar lets it go once its ranks have ended; it may still be on
    its way out then."""
    async with notice_server(run_dir) as server:
        traps = f"trap 'echo got 15; exit 3' TERM; trap 'exit {status}' USR1"
        line = f"{traps}; echo ready; while :; do sleep 0.05; done"
        async with started(run_dir, *("muster-run", "--", "sh", "-c", line), **GRACE) as run:
            await run.said("ready")
            run.process.send_signal(signal.SIGTERM)
            await server.came()
            if finishing:
                server.say("finishing", "the job is finishing: nothing is to be saved")
                server.say("released", "it takes part in no round", outcome="uncommitted")
                await until(lambda: all(client.is_closing() for client in server.clients))
            run.process.send_signal(signal.SIGUSR1)
            assert await run.ended() == status
            assert "got 15" not in run.out


UNREADABLE = ["rm {0}; mkdir {0}", "printf '\\377' > {0}"]
"""What becomes of the file of variables that the sidecar has delivered, by whoever may write."""


@pytest.mark.parametrize("spoil", UNREADABLE)
async def test_what_was_delivered_may_be_unreadable_at_the_end(run_dir: Path, spoil: str) -> None:
    command = spoil.format(shlex.quote(str(run_dir / "env"))) + "; exit 4"
    async with started(run_dir, "muster-run", "--", "sh", "-c", command) as run:
        assert await run.ended() == 4
        (line,) = run.err.splitlines()
        assert line.startswith("muster-run: using what the sidecar delivered before: ")


@pytest.mark.parametrize("spoil", UNREADABLE)
async def test_what_was_delivered_must_be_readable_at_the_start(run_dir: Path, spoil: str) -> None:
    env = run_dir / "env"
    command = spoil.format(shlex.quote(str(env)))
    assert await (await asyncio.create_subprocess_shell(command)).wait() == 0
    async with started(run_dir, "muster-run", "--", "echo", "started") as run:
        assert await run.ended() == 2
        (line,) = run.err.splitlines()
        assert line.startswith(f"muster-run: {env} ")


async def test_without_a_sidecar_there_is_nothing_to_hold_for(run_dir: Path, bare: Path) -> None:
    async with started(bare, "muster-run", *telltale(5)) as run:
        await run.said("ready")
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended() == 5
    # Whoever held it here would do so for longer than its end is waited for.
    grace = f"{2 * PATIENCE_S:g}"
    async with started(run_dir, "muster-run", *telltale(5), MUSTER_GRACE_S=grace) as run:
        await run.said("ready")
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended() == 5


# --- muster-hold ---


@pytest.mark.parametrize(("spoil", "given"), [("true", GRACE), *((one, {}) for one in UNREADABLE)])
async def test_the_hold_ends_with_the_drain_whatever_can_be_read(
    run_dir: Path, spoil: str, given: dict[str, str]
) -> None:
    command = spoil.format(shlex.quote(str(run_dir / "env")))
    async with notice_server(run_dir) as server:
        assert await (await asyncio.create_subprocess_shell(command)).wait() == 0
        async with started(run_dir, "muster-hold", **given) as hold:
            await server.came()
            assert server.notices[0]["notice"] == "hold"
            server.say("released", "every rank has saved", outcome="committed")
            assert await hold.ended() == 0
    assert "every rank has saved" in hold.err
    assert "Traceback" not in hold.err


async def test_the_hold_ends_before_the_grace_does(run_dir: Path) -> None:
    async with (
        notice_server(run_dir) as server,
        started(run_dir, "muster-hold", MUSTER_GRACE_S="15") as hold,
    ):
        await server.came()
        assert await hold.ended() == 0


async def test_the_hold_holds_nothing_without_a_sidecar(bare: Path) -> None:
    async with started(bare, "muster-hold") as hold:
        assert await hold.ended() == 0


@pytest.mark.parametrize(
    "line",
    [b"\n", b"{\n", b"[]\n", b"\xff\n", b'{"phase": 7}\n', b"[" * 5000 + b"\n", b"x" * 70000],
)
async def test_i8_no_word_of_the_sidecar_ends_the_hold_but_the_last(
    run_dir: Path, line: bytes
) -> None:
    async with held(run_dir) as (run, server):
        server.clients[0].write(line)
        if line != b'{"phase": 7}\n':
            await server.came(2)  # it is asked again
            server.clients.pop(0).close()
        assert await unheard(run)
        server.say("released", outcome="committed")
        assert await run.ended() == 143
