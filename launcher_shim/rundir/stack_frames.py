# SPDX-License-Identifier: Apache-2.0
"""The frames of a process's main thread, read from what faulthandler or py-spy prints: pure."""

from __future__ import annotations

import re
from typing import List, NamedTuple

FRAMES_MAX = 60
TEXT_MAX = 300

_FAULTHANDLER = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) ")


class StackFrame(NamedTuple):
    """One call; the innermost is the first of a stack. ``line`` is 0 if it is unknown."""

    path: str
    line: int
    function: str


def of_faulthandler(text: str) -> List[StackFrame]:
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


def of_py_spy(text: str) -> List[StackFrame]:
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
    return StackFrame(path[-TEXT_MAX:], line, function[:TEXT_MAX])
