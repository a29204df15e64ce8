# SPDX-License-Identifier: Apache-2.0
"""The program that torchrun starts as a worker's interpreter: it asks the zygote for the worker.

It passes signals on to the worker and ends as the worker does, by the same status or signal, as
torchrun knows a worker by this process alone. Where anything is not as expected, it becomes the
interpreter itself: a plain start.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Dict, List, Mapping, NoReturn

from launcher_shim.rundir import layout
from launcher_shim.warm import wire
from launcher_shim.warm.wire import circumstances

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 60.0
"""The zygote may still be importing what this worker would have to import itself."""
DEATH_TIMEOUT_S = 30.0
"""Maximum wait for the end of a killed worker: torchrun's own for a process it has killed."""
EXIT_LOST = 128 + signal.SIGKILL
"""The zygote is gone, and with it the worker's status."""

ALL = "all"
"""The file on all workers of a torchrun, in the place of a local rank."""

_NOT_PASSED = frozenset(
    {
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD),
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    }
)


def main() -> NoReturn:
    """Run as ``python ARGUMENT…`` would."""
    if sys.argv[1:] == [wire.TRIAL]:
        sys.exit(0)
    environ = {name: text for name, text in os.environ.items() if name != wire.OVERRIDE}
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    for number in signal.valid_signals() - _NOT_PASSED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _noted)
    try:
        line = _asked(environ)
        pid = _pid(line)
        note(environ, "")
    except (OSError, ValueError, wire.Unsaid) as error:
        signal.set_wakeup_fd(before)
        _start_plainly(environ, str(error) or type(error).__name__, _numbers(reader))
    while True:
        watched: List[Any] = [line, reader]
        ready, _, _ = select.select(watched, [], [])
        if line in ready:
            break  # and the number may be another process's
        for received in _numbers(reader):
            _to_group(pid, received)
    try:
        status = int(wire.receive(line)[0]["status"])
    except (OSError, ValueError, KeyError, wire.Unsaid):
        _kill(pid)
        os._exit(EXIT_LOST)
    _end_as(status)


def _noted(_number: int, _frame: object) -> None:
    """Let the signal wake the loop; it has the number."""


def _numbers(reader: int) -> bytes:
    try:
        return os.read(reader, 512)
    except BlockingIOError:
        return b""


def _asked(environ: Dict[str, str]) -> socket.socket:
    """Ask for a worker; raises ``OSError``."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(CONNECT_TIMEOUT_S)
    line.connect(wire.beside(sys.argv[0]))
    request = {
        "arguments": sys.argv[1:],
        "environ": environ,
        "folder": os.getcwd(),
        "circumstances": circumstances(),
        "stub": os.getpid(),
    }
    wire.send(line, request, (0, 1, 2))
    return line


def _pid(line: socket.socket) -> int:
    """Wait for the worker and return its number; raises ``ValueError`` with why there is none."""
    line.settimeout(ANSWER_TIMEOUT_S)
    answer, _ = wire.receive(line)
    if "pid" not in answer:
        raise ValueError(str(answer.get("why") or "its fork ended at once"))
    line.settimeout(None)
    return int(answer["pid"])


def note(environ: Mapping[str, str], why: str) -> None:
    """Leave the reason for a plain start in the run directory, for its sidecar; empty: none.

    It is one file for each local rank. The log has it where there is no such folder.
    """
    rank = next(filter(None, map(environ.get, wire.LOCAL_RANKS)), "")
    name = os.path.basename(rank) or ALL
    path = os.path.join(environ.get("MUSTER_RUN_DIR", ""), layout.PLAIN_STARTS, name)
    aside = "%s.%d" % (path, os.getpid())
    try:
        if why:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(aside, flags, 0o644), "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o644)  # the sidecar may be another user
                file.write(why)
            os.replace(aside, path)
        else:
            os.unlink(path)
    except OSError:
        return


def _to_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it has just ended, or is another user by now


def _kill(pid: int) -> None:
    """Kill a worker that has lost its zygote, and wait until it has ended."""
    ended: List[int] = []
    if sys.version_info >= (3, 9):
        with suppress(OSError):  # it has ended, or the kernel is older than 5.3
            ended.append(os.pidfd_open(pid))
    _to_group(pid, signal.SIGKILL)
    if ended:
        select.select(ended, [], [], DEATH_TIMEOUT_S)


def _start_plainly(environ: Dict[str, str], why: str, signals: bytes) -> NoReturn:
    """Become the interpreter; signals that have come meanwhile count for it."""
    note(environ, why)
    sys.stderr.write("muster-run: a worker starts without the zygote: %s\n" % why)
    sys.stderr.flush()
    for number in signal.valid_signals() - _NOT_PASSED:
        if signal.getsignal(number) is _noted:
            signal.signal(number, signal.SIG_DFL)
    for received in signals:
        os.kill(os.getpid(), received)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environ)


def _end_as(status: int) -> NoReturn:
    """End this process as ``status``, that of ``waitpid``, says."""
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left its own
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))
