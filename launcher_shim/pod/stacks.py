# SPDX-License-Identifier: Apache-2.0
"""The stacks of ranks that stand still, taken for the sidecar.

The sidecar may have another PID namespace, and is another user: only a process of the training
container can signal a rank. A rank with ``import muster`` writes its stacks itself
(``muster.stacks``); of another one py-spy shows them, if the image has it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from launcher_shim.rundir import layout
from launcher_shim.rundir.safe_open import open_regular, read_untrusted
from launcher_shim.rundir.stack_frames import StackFrame, of_faulthandler, of_py_spy

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval of looks for a question of the sidecar."""
ANSWER_S = 5.0
"""Time in which a rank writes its stacks: its process may wait for a processor."""
SETTLED_S = 0.25
"""Time without another byte after which the stacks count as whole."""
PY_SPY_S = 5.0
STACKS_SIGNAL = 61
"""As in ``muster.stacks``."""
ASKED_MAX_BYTES = 64 * 1024
STACKS_MAX_BYTES = 2 * 1024 * 1024
"""Length of a rank's file up to which it is asked for more."""

GONE = "X"
STILL = ("T", "t", GONE)
"""The states of a process that has ended, and of those that write no stacks."""


class AskedRank(NamedTuple):
    """A rank whose stacks are asked for; ``started`` in ticks since boot."""

    local_rank: int
    pid: int
    started: int


class Question(NamedTuple):
    """One question: its number, the ranks whose stacks are asked for, and those to end then."""

    ask: str
    ranks: Tuple[AskedRank, ...]
    end: Tuple[AskedRank, ...] = ()


def read_question(run_directory: str) -> Optional[Question]:
    """Read what the sidecar asks; None for nothing."""
    try:
        path = os.path.join(run_directory, layout.STACKS_ASKED)
        fields = json.loads(read_untrusted(path, ASKED_MAX_BYTES))
        ranks = tuple(AskedRank(*map(int, one)) for one in fields["ranks"])
        end = tuple(AskedRank(*map(int, one)) for one in fields.get("end", ()))
        return Question(str(fields["ask"]), ranks, end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class StackReporter:
    """The answers to the sidecar's questions, for as long as one command runs."""

    def __init__(self, run_directory: str) -> None:
        self._directory = run_directory
        self._answered = ""
        self._ended = False

    async def run(self) -> None:
        """Answer until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await loop.run_in_executor(None, self.turn)
                await asyncio.sleep(LOOK_S)
        finally:
            self._ended = True

    def turn(self) -> None:
        """Answer a question that is new; may block for as long as ranks take to write."""
        question = read_question(self._directory)
        if question is None or question.ask == self._answered:
            return
        self._answered = question.ask
        answer = {"schema": 1, "ask": question.ask, "ranks": self._stacks(question.ranks)}
        path = os.path.join(self._directory, layout.LAUNCH, layout.STACKS)
        aside = "%s.%d" % (path, os.getpid())
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with os.fdopen(open_regular(aside, flags, 0o644), "w", encoding="ascii") as file:
                os.fchmod(file.fileno(), 0o644)  # for the sidecar, whatever the umask is
                json.dump(answer, file)
            os.replace(aside, path)
        except OSError as error:
            log.warning("the stacks of ranks that stand still cannot be reported: %s", error)
        for rank in question.end:
            _end(rank)

    def _stacks(self, ranks: Sequence[AskedRank]) -> List[Dict[str, Any]]:
        """Return the state and the stack of each rank; both are empty if they are unknown."""
        live = [rank for rank in ranks if state_of(rank) not in STILL]
        dumps = {rank: found for rank in live if (found := self._signalled(rank)) is not None}
        waited_s, pending = 0.0, set(dumps)
        while pending and waited_s < ANSWER_S and not self._ended:
            time.sleep(SETTLED_S)
            waited_s += SETTLED_S
            pending = {rank for rank in pending if not dumps[rank].is_whole()}
        answers: List[Dict[str, Any]] = []
        for rank in ranks:
            frames = dumps[rank].frames() if rank in dumps else []
            if not frames and rank in live and not self._ended:
                frames = _by_py_spy(rank.pid)
            state = state_of(rank)
            place = {"local_rank": rank.local_rank, "pid": rank.pid}
            answers.append({**place, "state": state, "frames": frames})
        return answers

    def _signalled(self, rank: AskedRank) -> "Optional[_Dump]":
        """Have a rank write its stacks; None if it does not offer that."""
        name = "%d.stacks" % rank.local_rank
        dump = _Dump(os.path.join(self._directory, layout.PROGRESS, name))
        offer = b"process %d started %d\n" % (rank.pid, rank.started)
        try:
            # Without a handler the signal would end it.
            if offer not in dump.before or len(dump.before) >= STACKS_MAX_BYTES:
                return None
            if not _handles(rank.pid):
                return None
            os.kill(rank.pid, STACKS_SIGNAL)
        except OSError as error:
            log.warning("process %d cannot be asked for its stacks: %s", rank.pid, error)
            return None
        return dump


class _Dump:
    """The part that a rank adds to its file of stacks."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.before = self._last = self._read()

    def is_whole(self) -> bool:
        """Return whether it has written, and nothing more since the last call."""
        last, self._last = self._last, self._read()
        return len(self._last) == len(last) > len(self.before)

    def frames(self) -> List[StackFrame]:
        """Return the main thread's frames; none if it has written nothing."""
        return of_faulthandler(self._last[len(self.before) :].decode("utf-8", "replace"))

    def _read(self) -> bytes:
        try:
            return read_untrusted(self._path, STACKS_MAX_BYTES)
        except OSError:
            return b""


def state_of(rank: AskedRank) -> str:
    """Return the letter of a process's state in proc(5); ``GONE`` if it has ended."""
    try:
        with open("/proc/%d/stat" % rank.pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        state, started = fields[0].decode("ascii", "replace"), int(fields[19])
    except (OSError, ValueError, IndexError):
        return GONE
    return GONE if state == "Z" or started != rank.started else state


def _end(rank: AskedRank) -> None:
    """End a rank that keeps its world from training; torchrun finds that it has failed."""
    if state_of(rank) == GONE:
        return
    log.warning(
        "process %d, of local rank %d, keeps its world from training: it is ended",
        rank.pid,
        rank.local_rank,
    )
    try:
        os.kill(rank.pid, signal.SIGKILL)
    except OSError as error:
        log.warning("process %d cannot be ended: %s", rank.pid, error)


def _handles(pid: int) -> bool:
    """Return whether a process has a handler for ``STACKS_SIGNAL``; raises ``OSError``."""
    with open("/proc/%d/status" % pid, "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) & (1 << (STACKS_SIGNAL - 1)))
    return False


def _by_py_spy(pid: int) -> List[StackFrame]:
    program = shutil.which("py-spy")
    if program is None:
        return []
    try:
        run = subprocess.run(
            (program, "dump", "--nonblocking", "--pid", str(pid)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.info("py-spy gives no stack of process %d: %s", pid, error)
        return []
    return of_py_spy(run.stdout.decode("utf-8", "replace"))
