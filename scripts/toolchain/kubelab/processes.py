# SPDX-License-Identifier: Apache-2.0
"""The lab's own processes: started detached, with a log and a pid file, ended by pid.

A pid file also holds the start time of the process, so that a reused pid is not mistaken for it.
Each process is in a cgroup of the lab, so that its children can be found after its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kubelab.errors import LabError
from kubelab.layout import CGROUP, CGROUP_ROOT, LOGS, PIDS

KILL_TIMEOUT_S = 20.0
"""Timeout after SIGKILL: only a process in uninterruptible sleep outlives it."""

# Join the cgroup first, so that no child can escape it.
_ENTER = 'echo $$ >"$0" && exec "$@"'


def started_ticks(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; None if it has ended or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


def pid_of(name: str) -> int | None:
    """Return the pid of the named process; None if it does not run."""
    try:
        pid, ticks = map(int, (PIDS / name).read_text().split())
    except FileNotFoundError:
        return None
    return pid if started_ticks(pid) == ticks else None


def start(name: str, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Start a process unless it runs; return its pid."""
    if (pid := pid_of(name)) is not None:
        return pid
    LOGS.mkdir(parents=True, exist_ok=True)
    PIDS.mkdir(parents=True, exist_ok=True)
    cgroup = CGROUP_ROOT / "pids" / CGROUP / "host" / "cgroup.procs"
    with (LOGS / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            ["sh", "-c", _ENTER, str(cgroup), *argv],
            cwd="/",
            env={"PATH": os.environ["PATH"], "HOME": "/root", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    ticks = started_ticks(process.pid)
    if ticks is None:
        raise LabError(f"{name} ended as soon as it was started: {last_lines(name)}")
    # Renamed into place, so that a reader never sees an incomplete file.
    aside = PIDS / f"{name}.{os.getpid()}.part"
    aside.write_text(f"{process.pid} {ticks}\n")
    aside.replace(PIDS / name)
    # It outlives this program, which will not wait for it.
    process.returncode = 0
    return process.pid


def stop(name: str, timeout_s: float = 5.0) -> None:
    """Stop a process by SIGTERM, and by SIGKILL after ``timeout_s``; do nothing if it does not run.

    Raises LabError if it still runs ``KILL_TIMEOUT_S`` later.
    """
    deadline_s = time.monotonic() + timeout_s
    number = signal.SIGTERM
    while (pid := pid_of(name)) is not None:
        signal_process(pid, number)
        time.sleep(0.05)
        if time.monotonic() > deadline_s:
            number = signal.SIGKILL
        if time.monotonic() > deadline_s + KILL_TIMEOUT_S:
            raise LabError(f"{name} (process {pid}) outlives SIGKILL")
    (PIDS / name).unlink(missing_ok=True)


def signal_process(pid: int, number: signal.Signals) -> None:
    """Signal a process if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def last_lines(name: str, count: int = 5) -> str:
    """Return the end of a log, for an error message."""
    path = LOGS / f"{name}.log"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-count:])


def check(argv: Sequence[str], *, timeout_s: float = 120.0, stdin: str | None = None) -> str:
    """Run a command to its end and return its output.

    Raises LabError with the command's last lines if it fails, or if it takes too long.
    """
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(argv[:6])} has not ended within {timeout_s:g} s") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise LabError(f"{' '.join(argv[:6])} ended with {done.returncode}: {' '.join(words)}")
    return done.stdout
