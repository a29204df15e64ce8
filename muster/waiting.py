# SPDX-License-Identifier: Apache-2.0
"""A rank beside its steps: that it uses Muster, its stacks, and its share of waiting for others.

``faulthandler`` writes the stacks when ``muster-run`` asks, from the signal's handler itself, so a
rank that hangs in C code answers as well. The share is taken by samples: ranks of a world leave
each step together, so the rank that waits least is the one that the others wait for. Between two
looks nothing runs, so a step costs nothing more.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from random import Random
from typing import IO, Callable, Deque, Dict, Optional

from muster.process import CENTRAL_WAITS, began, leave_at_exit, master_of
from muster.saved_steps import NOT_PLAIN

DIRECTORY_NAME = "progress"
IMPORTED_NAME = "imported"
"""A file beside the progress files: the round whose ranks have imported this package."""

SAMPLE_S = 0.05
"""Usual interval of looks, which varies by half: a step may take as long."""
WINDOW_S = 1.0
"""Least length of a window, which begins and ends at a step boundary."""
WINDOWS, WINDOWS_MIN = 15, 3
"""The newest windows that count, and how many make a figure: a save or an evaluation lies in few of
them, and their median does not change by it."""

PYTHONS = re.compile(r"/lib(64)?/python3[^/]*/(?!site-packages|dist-packages)|^<(?!stdin|string)")
COLLECTIVES = re.compile(
    r"/torch/distributed/(?!checkpoint/)|/torch/nn/parallel/distributed\.py$"
    r"|/torch/autograd/(graph|__init__)\.py$|/torch/cuda/(__init__|streams)\.py$"
    r"|" + CENTRAL_WAITS
)
"""As in ``agent.stuck``."""

SLEEPS = (b"S", b"D")

STACKS_SIGNAL = 61
"""A signal for real-time use of its own: scripts use SIGUSR1 and SIGUSR2."""

STACKS_MAX_BYTES = 1024 * 1024
"""Length of the file from which on a rank begins it again."""


class WaitingShare:
    """The share of waiting in the newest windows."""

    def __init__(self) -> None:
        self._newest: Deque[float] = deque(maxlen=WINDOWS)
        self._mark = -1
        self._began = False
        self._took_s = self._waited_s = 0.0

    def add(self, took_s: float, mark: int, *, waits: bool) -> Optional[float]:
        """Count ``took_s`` of waiting or of work; return the share, None if it is not known yet.

        ``mark`` changes at each step boundary.
        """
        moved, self._mark = mark != self._mark, mark
        self._took_s += took_s
        self._waited_s += took_s if waits else 0.0
        if not moved or (self._began and self._took_s < WINDOW_S):
            return None
        if self._began:
            self._newest.append(self._waited_s / self._took_s)
        self._began, self._took_s, self._waited_s = True, 0.0, 0.0
        return _median(self._newest) if len(self._newest) >= WINDOWS_MIN else None


def _median(found: Deque[float]) -> float:
    """Return the median; to import ``statistics`` takes 3 ms of each start of a worker."""
    ordered, half = sorted(found), len(found) // 2
    return (ordered[half] + ordered[~half]) / 2


def watch(boundaries: Callable[[], int], tell: Callable[[Optional[float]], None]) -> None:
    """Watch this thread from another one: ``tell`` gets its share of waiting when that is new.

    ``boundaries`` changes at each step boundary, and is below 0 when there are no more. Where a
    device computes, a rank waits for it in other calls: then, and where the system does not show
    threads, nothing is said.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return  # frames of a thread that runs meanwhile cannot be read
    try:
        path = "/proc/self/task/%d/stat" % threading.get_native_id()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return
    words = (descriptor, threading.get_ident(), boundaries, tell)
    threading.Thread(target=_run, args=words, name="muster-waits", daemon=True).start()


def _run(
    descriptor: int,
    thread: int,
    boundaries: Callable[[], int],
    tell: Callable[[Optional[float]], None],
) -> None:
    share, chance = WaitingShare(), Random()
    known: Dict[str, Optional[bool]] = {}
    before_s = time.monotonic()
    try:
        while True:
            time.sleep(SAMPLE_S * chance.uniform(0.5, 1.5))
            mark = boundaries()
            if mark < 0 or _has_device():
                tell(None)
                return
            waits = _sleeps(descriptor) and _in_collective(thread, known)
            now_s = time.monotonic()
            found = share.add(now_s - before_s, mark, waits=waits)
            before_s = now_s
            if found is not None:
                tell(found)
    except OSError:
        tell(None)  # the training thread has ended
    finally:
        os.close(descriptor)


def _sleeps(descriptor: int) -> bool:
    return os.pread(descriptor, 512, 0).rpartition(b") ")[2][:1] in SLEEPS


def _in_collective(thread: int, known: Dict[str, Optional[bool]]) -> bool:
    """Return whether a thread's innermost call is collective.

    Returns before the next look: a frame keeps what its variables refer to.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        path = frame.f_code.co_filename
        if path not in known:
            known[path] = None if PYTHONS.search(path) else bool(COLLECTIVES.search(path))
        found = known[path]
        if found is not None:
            return found
        frame = frame.f_back
    return False


def _has_device() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


_stacks_file: Optional[IO[bytes]] = None


def offer_stacks(directory: str, local_rank: str, started: int) -> None:
    """Let ``STACKS_SIGNAL`` write the stacks of this process, and say so in the file.

    Does nothing if the script has a handler for it. Without the file there are no stacks, and
    training does not depend on it.

    Python's ``faulthandler`` writes them from the signal's handler itself, so a rank that hangs
    in C code, or in an endless loop, answers as well.
    """
    global _stacks_file
    register = getattr(faulthandler, "register", None)  # not on every system
    if register is None or _stacks_file is not None or not local_rank.isdigit():
        return
    with suppress(OSError, ValueError):
        if signal.getsignal(STACKS_SIGNAL) != signal.SIG_DFL:
            return
        path = os.path.join(directory, "%s.stacks" % local_rank)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0)
        if os.fstat(file.fileno()).st_size > STACKS_MAX_BYTES:
            file.truncate(0)
        os.fchmod(file.fileno(), 0o644)  # the sidecar is another user, whatever the umask is
        file.write(b"process %d started %d\n" % (os.getpid(), started))
        register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
        _stacks_file = file


def announce() -> None:
    """Report that this rank of torchrun uses Muster: newcomers then wait for its first step.

    Without it, a sidecar could not tell a rank that still loads from one that never reports a step.
    The rank leaves its process group as it ends.
    """
    run_dir, master = os.environ.get("MUSTER_RUN_DIR"), master_of(os.environ)
    if run_dir and master:
        leave_at_exit()
        directory = os.path.join(run_dir, DIRECTORY_NAME)
        offer_stacks(directory, os.environ.get("LOCAL_RANK", ""), began("self") or 0)
        path = os.path.join(directory, IMPORTED_NAME)
        # Without the file, newcomers wait for as long as the last start took.
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o644)
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, 0o644)  # the sidecar is another user, whatever the umask is
                file.write(NOT_PLAIN.sub("?", master))
