# SPDX-License-Identifier: Apache-2.0
"""The programs that a sidecar delivers, as a test starts them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agent.rundir.programs import PROGRAMS, program
from tests.support.sidecars.processes import PATIENCE_S


def deliver(path: Path) -> None:
    """Put all of them into the run directory ``path``, which has a place for them."""
    for name in PROGRAMS:
        (path / "bin" / name).write_bytes(program(name))
        (path / "bin" / name).chmod(0o755)


class Started:
    """A running program; ``lines`` of its output come as they are written."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.out: list[str] = []

    async def line(self) -> str:
        """Read the next line of its output."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            read = await self.process.stdout.readline()
        assert read, self.out
        self.out.append(read.decode().rstrip("\n"))
        return self.out[-1]

    async def complaint(self) -> str:
        """Read the next line of its standard error."""
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            return (await self.process.stderr.readline()).decode().rstrip("\n")

    async def said(self, line: str) -> None:
        """Read its output up to a line."""
        async with asyncio.timeout(PATIENCE_S):
            while line not in self.out:
                await self.line()

    async def ended(self) -> int:
        """Read on to its end; return its status."""
        async with asyncio.timeout(PATIENCE_S):
            rest, err = await self.process.communicate()
        self.out += rest.decode().splitlines()
        self.err = err.decode()
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def started(
    directory: Path, name: str, *arguments: str, **environ: str
) -> AsyncIterator[Started]:
    """Start one; it is killed at the end of the block if it still runs."""
    process = await asyncio.create_subprocess_exec(
        directory / "bin" / name,
        *arguments,
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Started(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
