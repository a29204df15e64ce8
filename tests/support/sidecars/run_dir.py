# SPDX-License-Identifier: Apache-2.0
"""A run directory in memory: what the two containers of a pod hand to each other.

It outlives the sidecar, as the real one does. A file is there whole or not at all; what a rank
tells of itself is kept as the record that the sidecar would have read, not as bytes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

from agent.rundir.files import RunDir, State
from agent.rundir.reports import FailureReport, LaunchReport
from launcher_shim.rundir import layout
from launcher_shim.rundir.rank_reports import StackFrame, StepLine
from rdzv.records.progress import RankProgress


class MemoryRunDir(RunDir):
    """A run directory whose files are a dictionary. ``written`` is set by the next write.

    ``progress``: what each rank tells, by local rank. ``on_hosts`` is called with each host list.
    ``told``: how far each rank is, by local rank. ``broken``: it takes no writes. ``full``: it
    has no room for another file. Of what
    ``muster-run`` reports of its launcher, and of workers of horovodrun, there is nothing.
    ``reported``: the errors of its ranks. ``stacked``: their states and stacks, by process, if
    ``muster-run`` answers.
    """

    def __init__(self) -> None:
        super().__init__("/memory")
        self.files: dict[str, bytes] = {}
        self.progress: dict[int, RankProgress] = {}
        self.told: dict[int, StepLine] = {}
        self.written = asyncio.Event()
        self.on_hosts: Callable[[bytes], None] = lambda content: None
        self.broken = False
        self.full = False
        self.reported: tuple[FailureReport, ...] = ()
        self.stacked: dict[int, tuple[str, list[StackFrame]]] | None = None

    def state(self, pod_uid: str) -> State:
        """What this pod's sidecar kept, or the state of a fresh pod."""
        content = self.files.get(layout.STATE)
        return State(pod_uid) if content is None else State.from_json(layout.STATE, content)

    def put_gate(self, content: bytes) -> None:
        """Change what lies there already, on a full disk as well."""
        MemoryRunDir._write(self, layout.GATE_PAGE, content, 0o644)

    def gate(self) -> bytes | None:
        """What was shown last."""
        return self.files.get(layout.GATE_PAGE, self.files.get(layout.GATE))

    def content(self, name: str) -> bytes | None:
        """What lies there under ``name``."""
        return self.files.get(name)

    def remove(self, name: str) -> None:
        """Delete what lies there under ``name``."""
        self.files.pop(name, None)

    def ranks(self) -> tuple[RankProgress, ...]:
        """What the ranks of this pod have published."""
        return tuple(self.progress[rank] for rank in sorted(self.progress))

    def steps(self) -> tuple[StepLine, ...]:
        """How far the ranks of this pod are."""
        return tuple(self.told[rank] for rank in sorted(self.told))

    def launch(self) -> LaunchReport | None:
        """Nothing is reported."""
        return None

    def failures(self) -> tuple[FailureReport, ...]:
        """The errors of the ranks of this pod."""
        return self.reported

    def stacks(self, ask: str) -> dict[int, tuple[str, list[StackFrame]]] | None:
        """The states and stacks of the ranks, once they are asked for."""
        asked = self.files.get(layout.STACKS_ASKED, b"")
        return self.stacked if f'"{ask}"'.encode() in asked else None

    def commands(self) -> int | None:
        """None ever came."""
        return None

    def plain_starts(self) -> tuple[str, ...]:
        """Every worker starts as it should."""
        return ()

    def _has(self, name: str, content: bytes, mode: int) -> bool:
        return self.files.get(name) == content

    def _write(self, name: str, content: bytes, mode: int) -> None:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        if self.full and not (name == layout.GATE_PAGE and name in self.files):
            raise OSError(errno.ENOSPC, "No space left on device")
        self.files[name] = content
        written, self.written = self.written, asyncio.Event()
        written.set()
        if name == layout.HOSTS:
            self.on_hosts(content)
