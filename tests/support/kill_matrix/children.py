# SPDX-License-Identifier: Apache-2.0
"""Tests that run in forked copies of a process that has collected them; a bug ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.support.kill_matrix.places import PRODUCT, ROOT, Code


class HangsError(BaseException):
    """A test took longer than it may. No ``except Exception`` of the product may swallow it."""


@dataclass(frozen=True)
class Ran:
    """One test that has run. ``codes``: functions of the product that it has called."""

    test: str
    failed: bool
    skipped: bool
    took_s: float
    forks: bool = False
    codes: tuple[Code, ...] = ()

    @classmethod
    def of(cls, told: dict[str, Any]) -> Ran:
        """Read one that a child has told of."""
        codes = tuple((path, line) for path, line in told["codes"])
        return cls(**{**told, "codes": codes})


Tell = Callable[[Any], None]
Work = Callable[[Tell], None]
"""What a child does; it tells of what it has found, as JSON."""


def limited(item: pytest.Item, limit_s: float) -> Ran:
    """Run one test in this process."""

    def ends(number: int, frame: FrameType | None) -> None:
        raise HangsError(item.nodeid)

    before = signal.signal(signal.SIGALRM, ends)
    signal.signal(signal.SIGPROF, ends)
    began_s = time.monotonic()
    # A second time, where the first one was lost in a callback.
    signal.setitimer(signal.ITIMER_REAL, limit_s, 5.0)
    # One that turns in circles ends before one that waits: it cannot be a busy machine.
    signal.setitimer(signal.ITIMER_PROF, limit_s / 2, 5.0)
    try:
        reports = runtestprotocol(item, log=False, nextitem=None)
        failed = any(report.failed for report in reports)
        skipped = any(report.skipped for report in reports)
    except BaseException:  # It hangs, or ends the session: by the bug, as it does not without.
        failed, skipped = True, False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGALRM, before)
    return Ran(item.nodeid, failed, skipped, time.monotonic() - began_s)


def traced(item: pytest.Item, limit_s: float) -> Ran:
    """Run one test; note which functions of the product it calls, and if it starts processes."""
    codes, forks = set(), []

    def trace(frame: FrameType, event: str, argument: object) -> None:
        codes.add(frame.f_code)

    def hear(name: str) -> None:
        if name in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"):
            forks.append(name)

    _hearers[:] = [hear]
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        ran = limited(item, limit_s)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        _hearers.clear()
    roots = tuple(f"{ROOT}/{one}/" for one in PRODUCT)
    own = {(c.co_filename, c.co_firstlineno) for c in codes if c.co_filename.startswith(roots)}
    return Ran(ran.test, ran.failed, ran.skipped, ran.took_s, bool(forks), tuple(sorted(own)))


_hearers: list[Callable[[str], None]] = []


def hear_of_processes() -> None:
    """From now on, ``traced`` hears of processes that are started. It cannot be taken back."""
    sys.addaudithook(lambda name, _: [hear(name) for hear in _hearers] and None)


@dataclass
class Child:
    """A forked copy at work."""

    pid: int
    pipe: Connection
    ends_s: float
    files: str

    def end(self) -> None:
        """End it and what it has started."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        shutil.rmtree(self.files, ignore_errors=True)


def fork(session: pytest.Session, work: Work, limit_s: float) -> Child:
    """Let a copy of this process do some work."""
    ours, theirs = Pipe(duplex=False)
    # Short, because paths of sockets must be.
    files = tempfile.mkdtemp(prefix="km.", dir="/tmp")
    pid = os.fork()
    if pid:
        theirs.close()
        return Child(pid, ours, time.monotonic() + limit_s, files)
    try:
        os.setsid()
        ours.close()
        factory: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = Path(files)
        work(lambda told: theirs.send_bytes(json.dumps(told).encode()))
    finally:
        os._exit(0)


def run(
    session: pytest.Session, jobs: Sequence[tuple[str, Work]], at_once: int, limit_s: float
) -> Iterator[tuple[str, Any]]:
    """Do pieces of work, some at once; give what each tells of, and None where one is over."""
    waiting = list(reversed(jobs))
    working: dict[Connection, tuple[str, Child]] = {}
    try:
        while waiting or working:
            while waiting and len(working) < at_once:
                name, work = waiting.pop()
                child = fork(session, work, limit_s)
                working[child.pipe] = name, child
            due_s = min(child.ends_s for _, child in working.values()) - time.monotonic()
            for pipe in wait(list(working), max(0.0, due_s)):
                assert isinstance(pipe, Connection)
                name, child = working[pipe]
                try:
                    yield name, json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    del working[pipe]
                    child.end()
                    yield name, None
            for pipe, (name, child) in list(working.items()):
                if child.ends_s <= time.monotonic():
                    del working[pipe]
                    child.end()
                    yield name, None
    finally:
        for _, child in working.values():
            child.end()
