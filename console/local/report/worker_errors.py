# SPDX-License-Identifier: Apache-2.0
"""The failures of workers, parsed from their launcher's log: pure, fed with text as it comes.

torchrun passes its workers' standard error on, and logs ``failed (exitcode: 1) local_rank: 0`` as
soon as it sees one end. The worker's own error is before that line; with a process group, torch
marks each of its lines with ``[rank0]:``.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_FAILED = re.compile(r"E\d{4} .*\] failed \(exitcode: (-?\d+)\) local_rank: (\d+) ")
_TORCHRUN_LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d")
_RANK = re.compile(r"\[rank(\d+)\]: ?")
_TRACEBACK = "Traceback (most recent call last):"
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")

_OF_ANOTHER = re.compile(r"(closed|reset) by peer|[Bb]roken pipe|remote process exited")
"""Errors that a worker raises because another one has ended."""

_BY_TORCHRUN = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
"""The error of a worker that torchrun ends, as its world ends."""

_REFUSAL = re.compile(r"(ValueError|TypeError): (muster\.|MusterCallback\b|batch_plan:)")
"""The errors by which the library refuses a script."""

_FRAME = re.compile(r'  File "(?!<)(.+)", line (\d+)')
_LIBRARY = re.compile(r"(site|dist)-packages/|/lib/python\d|/muster/")
"""The paths of code that is not the user's."""

MAX_SENTENCE = 300


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """One worker that ended.

    ``sentence`` is the error that it raised, or its exit status; ``traceback`` ends with the error.
    """

    local_rank: int
    sentence: str
    traceback: tuple[str, ...] = field(default=(), compare=False)

    @property
    def kind(self) -> str:
        """The sentence without its numbers, which may be ports, addresses or pids."""
        return _NUMBER.sub("#", self.sentence)

    @property
    def follows_another(self) -> bool:
        """Whether the end of another worker is its cause."""
        return _OF_ANOTHER.search(self.sentence) is not None

    @property
    def follows_its_world(self) -> bool:
        """Whether torchrun ended it with its world: no error of its own."""
        return _BY_TORCHRUN.search(self.sentence) is not None

    @property
    def is_refusal(self) -> bool:
        """Whether Muster refused the script, as it will each time."""
        return _REFUSAL.match(self.sentence) is not None

    @property
    def shown(self) -> str:
        """The sentence for people; that of a worker which follows another's end is short."""
        if (ended := _BY_TORCHRUN.search(self.sentence)) is not None:
            return f"torchrun ended it with signal {ended[1]}, as its world ends"
        if (cause := _OF_ANOTHER.search(self.sentence)) is not None:
            return f"it lost another worker ({cause[0]})"
        frames = [
            frame
            for line in self.traceback
            if (frame := _FRAME.match(line)) and not _LIBRARY.search(frame[1])
        ]
        place = f" ({frames[-1][1].rpartition('/')[2]}:{frames[-1][2]})" if frames else ""
        return f"{self.sentence}{place}"


class WorkerErrors:
    """A reader of one launcher's log, piece by piece."""

    def __init__(self) -> None:
        self._rest = ""
        self._tracebacks: dict[str, list[str]] = {}
        self._ended: dict[str, tuple[str, ...]] = {}
        self._last_line = ""

    def take_in(self, text: str) -> list[WorkerFailure]:
        """Take in the next piece of the log; return the failures in it."""
        lines = (self._rest + text).split("\n")
        self._rest = lines.pop()
        return list(self._failures(lines))

    def _failures(self, lines: Iterable[str]) -> Iterator[WorkerFailure]:
        for line in lines:
            if failed := _FAILED.match(line):
                yield self._failure(int(failed[1]), int(failed[2]))
                self._tracebacks.clear()
                self._ended.clear()
                self._last_line = ""
                continue
            if line.strip() and not _TORCHRUN_LINE.match(line):
                self._last_line = line.strip()
            marked = _RANK.match(line)
            speaker = marked[1] if marked else ""
            said = line[marked.end() :] if marked else line
            if said == _TRACEBACK:
                self._tracebacks[speaker] = []
            elif (traceback := self._tracebacks.get(speaker)) is not None and said:
                traceback.append(said)
                if not said.startswith(" "):
                    self._ended[speaker] = tuple(self._tracebacks.pop(speaker))

    def _failure(self, exit_code: int, local_rank: int) -> WorkerFailure:
        # Of several workers with an error, take the first: the others failed because it did.
        lines = next(iter(self._ended.values()), ())
        if lines:
            return WorkerFailure(local_rank, lines[-1][:MAX_SENTENCE], lines)
        sentence = _ended(exit_code)
        if self._last_line:
            sentence += f"; the last line: {self._last_line[:MAX_SENTENCE]}"
        return WorkerFailure(local_rank, sentence)


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"it ended with {exit_code}"
    try:
        return f"it was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"it was killed by signal {-exit_code}"
