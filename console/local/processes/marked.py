# SPDX-License-Identifier: Apache-2.0
"""Every process of a run or of one of its nodes, found by the marks in its environment.

A child inherits the marks, whatever session or process group it goes to, and keeps them when its
parent dies: that is what makes a simulated node die as a whole, and a run leave nothing behind.
Linux only: reads ``/proc``. Everything here blocks for milliseconds; call it off the event loop.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Set
from pathlib import Path

RUN_MARK = "MUSTER_JOB_UID"
NODE_MARK = "MUSTER_MEMBER"

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


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
