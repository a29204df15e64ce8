# SPDX-License-Identifier: Apache-2.0
"""The lines of a job that ``muster local`` runs: from its files, which have no times.

So past lines are shown node by node. Lines that come have the time at which they are read.
"""

from __future__ import annotations

import asyncio
import codecs
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns

from agent.config.job import JobConfig
from console.job.reading import following
from console.logs.following import Print
from console.logs.lines import Line, Source, shown
from console.logs.printing import Pages, PrintedLine
from console.logs.ranks import Origin
from console.running import RunningJob, running

LOOK_S = 0.2
"""Interval at which files are read: the order of lines of two nodes is known to this."""

PIECE_BYTES = 2**16
LINE_MAX = 2**20
"""The longest line in one piece, in characters."""

SIDECAR = "sidecar.log"


@dataclass(slots=True)
class LogFile:
    """One file, and how far it is read."""

    path: Path
    source: Source
    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _rest: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the whole lines that are new; blocks on the disk."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while piece := file.read(PIECE_BYTES):
                self.offset += len(piece)
                *whole, self._rest = (self._rest + self._decoder.decode(piece)).split("\n")
                yield from whole
                if len(self._rest) > LINE_MAX:
                    yield self._rest
                    self._rest = ""

    def all(self) -> Iterator[str]:
        """Yield what is new of a file that is written no more, also a line without its end."""
        yield from self.lines()
        if self._rest:
            yield self._rest


@dataclass(slots=True)
class LocalLogs:
    """The logs of one job of ``muster local``; ``ended``: nothing is added to them."""

    job: RunningJob
    pages: Pages
    print: Print
    tail: int | None = None
    with_sidecar: bool = False
    ended: bool = False
    _files: dict[Path, LogFile] = field(default_factory=dict)

    def show_past(self) -> None:
        """Print the lines up to now, node by node; blocks on the disk."""
        self._find()
        self._show_past()

    async def follow(self, config: JobConfig) -> None:
        """Print the lines up to now, and those that come, to the job's end."""
        await asyncio.to_thread(self.show_past)
        worlds = asyncio.create_task(self._follow_worlds(config), name="worlds")
        try:
            while True:
                runs = await asyncio.to_thread(self._runs)
                await self.look()
                if not runs:
                    return
                if worlds.done():
                    worlds.result()
                await asyncio.sleep(LOOK_S)
        finally:
            worlds.cancel()

    def _show_past(self) -> None:
        """Print what is there, node by node; blocks on the disk."""
        for one in self._files.values():
            lines = one.all() if self.ended else one.lines()
            past = lines if self.tail is None else deque(lines, self.tail)
            for text in past:
                if not self.pages.wanted.all:
                    continue  # their rank and world are not known
                self.print(PrintedLine(shown(text), Origin(one.source)))

    def _find(self) -> None:
        """Find the files of nodes that are new; blocks on the disk."""
        for path in sorted(Path(self.job.logs).glob("*/*.log")):
            if path in self._files or (path.name == SIDECAR and not self.with_sidecar):
                continue
            also = "sidecar" if path.name == SIDECAR else ""
            self._files[path] = LogFile(path, Source(path.parent.name, also))

    async def look(self) -> None:
        """Print the lines that have come since the last look."""
        await asyncio.to_thread(self._find)
        for one in self._files.values():
            for text in await asyncio.to_thread(list, one.lines()):
                for line in self.pages.print(Line(time_ns(), one.source, text)):
                    self.print(line)
        for line in self.pages.rest():  # a new world may say nothing for long
            self.print(line)

    def _runs(self) -> bool:
        return any(one.pid == self.job.pid for one in running())

    async def _follow_worlds(self, config: JobConfig) -> None:
        began = False
        async with following(config) as views:
            async for view in views:
                self.pages.take_in(view.history)
                self.pages.seat({member.name: member.slots for member, _, _ in view.members()})
                if not began:
                    self.pages.begin()
                    began = True
