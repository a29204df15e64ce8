# SPDX-License-Identifier: Apache-2.0
"""The reports of a container's ranks: progress lines, the steps that they count, stacks and errors.

A rank overwrites its progress line in place, and a concurrent reader gets parts of two writes,
which the checksum detects. A line stays after its rank has ended, until another rank of that number
replaces it. The report of an uncaught exception is renamed into place, one for each local rank.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from types import TracebackType
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Type, Union

from launcher_shim.rundir import layout
from launcher_shim.rundir.layout import read_untrusted

PROGRESS_MAX_BYTES = 4096
PROGRESS_READS = 5
"""Maximum number of reads of a line that a rank may just be overwriting."""

_SUM_END = len('{"crc":"00000000"')


def read_whole(path: "Union[str, os.PathLike[str]]") -> Optional[bytes]:
    """Read one line; None if there is none, or none that is whole in ``READS`` reads.

    A concurrent reader gets parts of two writes, which the checksum detects.
    """
    for _ in range(PROGRESS_READS):
        try:
            content = read_untrusted(path, PROGRESS_MAX_BYTES)
        except OSError:
            return None  # the training script may put anything there
        if is_whole(content):
            return content
    return None


def is_whole(content: bytes) -> bool:
    """Return whether the line is as one write made it."""
    try:
        checksum = int(content[len('{"crc":"') : _SUM_END - 1], 16)
    except ValueError:
        return False
    return content.endswith(b"\n") and checksum == zlib.crc32(content[_SUM_END:])


class StepLine(NamedTuple):
    """One process's report at one moment.

    ``process`` is its number and its start time, which together no other process has. ``first`` is
    the first step that it reported, None if it does not say; both steps are -1 before its first
    boundary.
    """

    process: Tuple[int, int]
    first: Optional[int]
    step: int


def read_steps(directory: "os.PathLike[str] | str") -> Tuple[StepLine, ...]:
    """Read the line of every rank; skip files that are no progress lines."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
    except OSError:
        return ()
    lines = (_read(os.path.join(directory, name)) for name in names)
    return tuple(line for line in lines if line is not None)


def _read(path: str) -> Optional[StepLine]:
    content = read_whole(path)
    try:
        fields = json.loads(content or b"null")
        first = fields.get("first")
        return StepLine(
            (int(fields["pid"]), int(fields["started"])),
            None if first is None else int(first),
            int(fields["step"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


class StepCount(NamedTuple):
    """The count of one torchrun's steps.

    ``began``: by process, the step from which its own steps count. ``first`` is that of the first
    process that has made one, ``highest`` the highest step of all. ``told``: whether a rank has
    reported anything.

    A torchrun starts its workers again several times. A job that goes on from a checkpoint
    repeats some steps then, and a script may count from 0 each time: so the number is how far
    the job has come since the first step that this torchrun's ranks reported.
    """

    began: Mapping[Tuple[int, int], int]
    first: Optional[int] = None
    highest: int = -1
    told: bool = False

    @property
    def made(self) -> Optional[int]:
        """The number of steps made; None while no rank has reported anything."""
        if self.first is not None:
            return self.highest - self.first
        return 0 if self.told else None

    def seen(self, lines: Iterable[StepLine]) -> StepCount:
        """Return the count after the ranks' present reports."""
        count = self
        for line in lines:
            count = count._with(line)
        return count

    def _with(self, line: StepLine) -> StepCount:
        before = self.began.get(line.process)
        if before is not None and line.step <= before:
            return self  # it may have ended before this torchrun was there
        if line.step < 0:
            return self._replace(told=True)
        if before is None or before < 0:
            before = line.step if line.first is None or line.first < 0 else line.first
        known: Dict[Tuple[int, int], int] = {**self.began, line.process: before}
        first = before if self.first is None else self.first
        return StepCount(known, first, max(self.highest, line.step), told=True)


def count_from(lines: Iterable[StepLine]) -> StepCount:
    """Begin to count at ``lines``, whose processes were there before, and may have ended."""
    return StepCount({line.process: line.step for line in lines})


FRAMES_MAX = 60
FRAME_TEXT_MAX = 300

_FAULTHANDLER = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) ")


class StackFrame(NamedTuple):
    """One call; the innermost is the first of a stack. ``line`` is 0 if it is unknown."""

    path: str
    line: int
    function: str


def frames_of_faulthandler(text: str) -> List[StackFrame]:
    """Return the main thread's frames: its thread is the oldest, and faulthandler's last."""
    found: List[StackFrame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            found = []
        frame = _FAULTHANDLER.match(line)
        if frame is not None and len(found) < FRAMES_MAX:
            path, number, function = frame.groups()
            found.append(_frame(path, number, function))
    return found


def frames_of_py_spy(text: str) -> List[StackFrame]:
    """Return the main thread's frames."""
    found: List[StackFrame] = []
    within = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            within = '"MainThread"' in line
        function, _, place = line.strip().rpartition(" (")
        path, _, number = place.rpartition(":")
        is_frame = within and line.startswith(" ") and function and path and number[-1:] == ")"
        if is_frame and number[:-1].isdigit() and len(found) < FRAMES_MAX:
            found.append(_frame(path, number[:-1], function))
    return found


def _frame(path: str, number: str, function: str) -> StackFrame:
    line = int(number[:9]) if number.isdigit() else 0
    return StackFrame(path[-FRAME_TEXT_MAX:], line, function[:FRAME_TEXT_MAX])


ERROR_TEXT_MAX = 1000
"""The longest text in a report, in characters; the sidecar masks it and cuts it again."""


def report_error(
    kind: Type[BaseException],
    error: BaseException,
    trace: Optional[TracebackType],
    environ: Mapping[str, str],
) -> None:
    """Write the report into the run directory.

    Raises ``OSError`` if that fails; ``KeyError`` or ``ValueError`` without the variables of
    torchrun and the sidecar.
    """
    local_rank = int(environ["LOCAL_RANK"])
    fields = {
        "schema": 1,
        "pid": os.getpid(),
        "rank": int(environ["RANK"]),
        "local_rank": local_rank,
        "master": "%s:%s" % (environ["MASTER_ADDR"], environ["MASTER_PORT"]),
        "kind": kind.__name__[:ERROR_TEXT_MAX],
        "text": str(error)[:ERROR_TEXT_MAX],
        "where": _raised_at(trace),
        "at_boot_s": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3),
    }
    path = os.path.join(environ["MUSTER_RUN_DIR"], layout.RANK_ERRORS, "%d.json" % local_rank)
    aside = "%s.%d" % (path, os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(aside, flags, 0o644), "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), 0o644)  # whatever the umask is: the sidecar may be another user
        json.dump(fields, file)
    os.replace(aside, path)


_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


def _raised_at(trace: Optional[TracebackType]) -> str:
    """Return ``FILE:LINE`` of the last line of the script, or of the last one at all.

    What a library raises is of no help without the line that called it.
    """
    found = ""
    own = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        found = "%s:%d" % (os.path.basename(name), trace.tb_lineno)
        if (
            "site-packages" not in name
            and "dist-packages" not in name
            and "/lib/python" not in name
        ):
            own = found
        trace = trace.tb_next
    return own or found
