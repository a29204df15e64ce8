# SPDX-License-Identifier: Apache-2.0
"""The ranks of one torchrun as ``muster-run`` watches them: steps made, a restart for them, stacks.

torchrun counts the failures of its workers, and ends with an error at one more than its
``--max-restarts``, however much was trained between them. Progress distinguishes a job that has
some bad luck from one that cannot train: with it, the same command is started with a new budget.
Stacks of ranks that stand still are taken here, as the sidecar may have another PID namespace, and
is another user. A rank with ``import muster`` writes its stacks itself (``muster.waiting``); of
another one py-spy shows them, if the image has it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from launcher_shim.exit_status import ENDING_SIGNALS
from launcher_shim.rundir import layout
from launcher_shim.rundir.layout import open_regular, read_untrusted
from launcher_shim.rundir.rank_reports import (
    StackFrame,
    count_from,
    frames_of_faulthandler,
    frames_of_py_spy,
    read_steps,
)

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval of looks for a question of the sidecar."""
ANSWER_S = 5.0
"""Time in which a rank writes its stacks: its process may wait for a processor."""
SETTLED_S = 0.25
"""Time without another byte after which the stacks count as whole."""
PY_SPY_S = 5.0
STACKS_SIGNAL = 61
"""As in ``muster.waiting``."""
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
    """The answers to the sidecar's questions, for as long as one command runs.

    The sidecar may have another PID namespace, and is another user: only a process of the
    training container can signal a rank. A rank with ``import muster`` writes its stacks itself
    (``muster.stacks``); of another one py-spy shows them, if the image has it.
    """

    def __init__(self, run_directory: str) -> None:
        self._directory = run_directory
        self._answered = ""
        self._ended = False

    def end(self) -> None:
        """Wait for no rank any longer: the command has ended."""
        self._ended = True

    def look(self) -> float:
        """Answer a question that is new; return when to look again, in seconds.

        It may block for as long as ranks take to write.
        """
        question = read_question(self._directory)
        if question is not None and question.ask != self._answered:
            self._answer(question)
        return LOOK_S

    def _answer(self, question: Question) -> None:
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
        return frames_of_faulthandler(self._last[len(self.before) :].decode("utf-8", "replace"))

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
    return frames_of_py_spy(run.stdout.decode("utf-8", "replace"))


RESTART_STEPS = "MUSTER_RESTART_STEPS"
DEFAULT_STEPS = 200
MAX_STEPS = 999_999_999

_COUNT = re.compile(r"\d{1,9}", re.ASCII)


class Ended(NamedTuple):
    """One command that has ended.

    ``status`` is as in a shell. ``steps``: the number that its ranks have made; None if they report
    none, or it is no torchrun. ``passed``: the signals that were passed on to it. ``drained``: the
    end of its pod has begun.
    """

    status: int
    steps: Optional[int]
    passed: FrozenSet[int] = frozenset()
    drained: bool = False


def restart_steps(environ: Mapping[str, str]) -> int:
    """Read the number of steps for a restart, 0 for none ever; raises ``ValueError``."""
    text = (environ.get(RESTART_STEPS) or str(DEFAULT_STEPS)).strip()
    if _COUNT.fullmatch(text) is None:
        raise ValueError(
            f"{RESTART_STEPS} is {text!r}: give a number of steps from 0 (never) to {MAX_STEPS},"
            f" as in {DEFAULT_STEPS}"
        )
    return int(text)


def starts_again(ended: Ended, least_steps: int) -> Tuple[bool, str]:
    """Decide whether a command that has ended starts again, and why; the reason may be empty.

    ``least_steps``: the number that must have been made; 0: it is never started again.
    """
    status, steps = ended.status, ended.steps
    by_signal = status - 128 in ended.passed or bool(ENDING_SIGNALS & ended.passed)
    if status == 0 or steps is None or not least_steps or by_signal or ended.drained:
        return False, ""
    made = f"torchrun ended with {status} after {steps} steps"
    if steps < least_steps:
        why = f"it is not started again, for that takes {least_steps} ({RESTART_STEPS})"
        return False, f"{made}: {why}"
    why = f"it is started again, with all of its restarts ({RESTART_STEPS}={least_steps})"
    return True, f"{made}: {why}"


STEPS_LOOK_S = 2.0
"""Poll interval: the ranks' files give no notification of a change. Ranks that live for less than
this may go uncounted; those after them show how far the job is."""


class StepWatch:
    """A count of the steps that are made from its creation on."""

    def __init__(self, run_directory: str) -> None:
        self._path = os.path.join(run_directory, layout.PROGRESS)
        self._count = count_from(read_steps(self._path))

    def look(self) -> float:
        """Read the ranks' steps; return when to look again, in seconds."""
        self.made()
        return STEPS_LOOK_S

    def made(self) -> Optional[int]:
        """Read the ranks' steps; return how many were made, None while no rank reports any."""
        self._count = self._count.seen(read_steps(self._path))
        return self._count.made
