# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: started, found by the marks in their environment, ended; and their ports.

A child inherits the marks, whatever session or process group it goes to, and keeps them when its
parent dies: that is what makes a simulated node die as a whole, and a run leave nothing behind.
Run as a program it outlives ``muster local`` by a moment, to end what that left behind. Linux
only: reads ``/proc``. What finds and ends marked processes blocks for milliseconds: call it off
the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import random
import shutil
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from pathlib import Path

from rdzv.errors import ConfigError

RUN_MARK = "MUSTER_JOB_UID"
NODE_MARK = "MUSTER_MEMBER"

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

POLL_INTERVAL_S = 0.1
ANSWER_TIMEOUT_S = 2.0

_RANGE = range(18000, 32000)
"""Below the range from which Linux and torch choose ports by themselves (32768 on), so that no
connection takes one between the choice and its use."""

_ATTEMPTS = 200

TIME_TO_END_S = 10.0


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it, so that it can reap them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def marked(run: str, node: str | None = None) -> set[int]:
    """Find the live processes of a run, or of one node of it."""
    of_node = () if node is None else (f"{NODE_MARK}={node}",)
    return holding(f"{RUN_MARK}={run}", *of_node)


def holding(*settings: str) -> set[int]:
    """Find the live processes whose environment holds all of these ``NAME=value``.

    Zombies have no environment left, and are not found.
    """
    wanted = {setting.encode() for setting in settings}
    pids = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or belongs to somebody else
        if wanted <= set(environment.split(b"\0")):
            pids.add(int(entry.name))
    return pids


def children(parent: int) -> set[int]:
    """Return the children of one process that it has not reaped yet."""
    try:
        return set(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))
    except FileNotFoundError:
        return set()  # it has ended


def send(pids: Set[int], number: signal.Signals) -> None:
    """Signal each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def send_to_all(find: Callable[[], set[int]], number: signal.Signals) -> None:
    """Signal every process that ``find`` finds, and those that were forked meanwhile."""
    reached: set[int] = set()
    while pids := find() - reached:
        send(pids, number)
        reached |= pids


def end_all(find: Callable[[], set[int]], own: Set[int], deadline_s: float) -> set[int]:
    """Send SIGKILL until ``find`` finds nothing more; return what is left at the deadline.

    ``deadline_s`` is on the monotonic clock; only a process in the kernel's uninterruptible sleep
    outlives SIGKILL. ``own`` are children that the caller waits for; adopted ones are reaped here.
    """
    killed: set[int] = set()
    while (left := find()) and time.monotonic() < deadline_s:
        send(left, signal.SIGKILL)
        killed |= left
        time.sleep(0.005)
    for pid in killed - left - own:
        _reap(pid, deadline_s)
    return left


def _reap(pid: int, deadline_s: float) -> None:
    """Reap a dying orphan by the deadline, if this process has adopted it."""
    try:
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline_s:
            time.sleep(0.001)
    except ChildProcessError:
        return  # its parent was still there, or reaped it


async def start_child(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start ``command`` in a session of its own, so that Ctrl-C reaches only this process."""
    output = await asyncio.to_thread(log.open, "ab")
    with output:
        return await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )


async def end_child(process: Process, timeout_s: float) -> int:
    """Send SIGTERM, and SIGKILL after ``timeout_s``; return the exit status."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


async def until_ready(port: int) -> None:
    """Poll ``/readyz`` on the loopback until it answers 200; the caller sets the deadline."""
    while not await _is_ready(port):  # noqa: ASYNC110 - another process has no event to give
        await asyncio.sleep(POLL_INTERVAL_S)


async def _is_ready(port: int) -> bool:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False  # it does not listen yet
    return status_line.split()[1:2] == [b"200"]


def free_ports(count: int, randomness: random.Random, given: Set[int] = frozenset()) -> list[int]:
    """Find ports on which nothing listens, neither on 127.0.0.1 nor on ::1.

    None of ``given``: the processes that those were chosen for may not listen yet. Raises
    ``ConfigError`` if there are too few.
    """
    with ExitStack() as held:
        ports: list[int] = []
        for _ in range(_ATTEMPTS):
            if len(ports) == count:
                return ports
            port = randomness.choice(_RANGE)
            if port in given:
                continue
            if all(_hold(family, address, port, held) for family, address in _loopbacks()):
                ports.append(port)
    raise ConfigError(f"no {count} free ports from {_RANGE.start} to {_RANGE.stop - 1}")


def _loopbacks() -> list[tuple[socket.AddressFamily, str]]:
    both = [(socket.AF_INET, "127.0.0.1")]
    if socket.has_ipv6:
        both.append((socket.AF_INET6, "::1"))
    return both


def _hold(family: socket.AddressFamily, address: str, port: int, held: ExitStack) -> bool:
    try:
        listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.bind((address, port))
    except OSError as error:
        # A machine without IPv6 has no ::1 to bind, and nobody else can either.
        return error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def sweep() -> None:
    """Wait for the end of standard input, then sweep; arguments: the run and its directory."""
    _, run, directory = sys.argv
    sys.stdin.buffer.read()
    end_all(lambda: marked(run), set(), time.monotonic() + TIME_TO_END_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sweep()
