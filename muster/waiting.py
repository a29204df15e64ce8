# SPDX-License-Identifier: Apache-2.0
"""The share of its time that a rank waits for others, taken by samples.

Ranks of a world leave each step together, so the rank that waits least is the one that the others
wait for. A thread looks at the training thread some times a second: it waits if it sleeps, and its
innermost call that is not of Python's own library is a collective operation. Between two looks
nothing runs, so a step costs nothing more.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from random import Random
from typing import Callable, Deque, Dict, Optional

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
    r"|/horovod/[^/]+/(mpi_ops|functions)\.py$|/horovod/common/"
)
"""As in ``agent.stuck.frames``."""

SLEEPS = (b"S", b"D")


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
