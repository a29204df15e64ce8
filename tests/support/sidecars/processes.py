# SPDX-License-Identifier: Apache-2.0
"""Runs ``muster`` as a real process, for tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.ports import free_ports

ROOT = Path(__file__).parents[3]
PATIENCE_S = 90.0
"""Ends what hangs of a process."""


@dataclass
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


CONSOLE = ("-m", "console.main")
"""Python's arguments that run the command line."""

PATIENT = ("-m", "tests.support.sidecars.patient")
"""Those that run it with limits that no stall of the machine exceeds."""


async def muster(*arguments: str, **environ: str) -> Ended:
    """Run one command to its end."""
    return await ended(arguments, environ)


async def impatient_muster(*arguments: str, **environ: str) -> Ended:
    """Run one command to its end with the limits that users have, on a store that is away."""
    return await ended(arguments, environ, CONSOLE)


async def ended(
    arguments: tuple[str, ...], environ: dict[str, str], runner: tuple[str, ...] = PATIENT
) -> Ended:
    """Run one command to its end, as ``runner`` has it."""
    process = await started(arguments, environ, runner)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def started(
    arguments: tuple[str, ...], environ: dict[str, str], runner: tuple[str, ...] = PATIENT
) -> asyncio.subprocess.Process:
    """Start a command, as ``runner`` has it; nothing but ``environ`` is set of our variables."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *runner,
        *arguments,
        cwd=ROOT,
        env={**clean, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@dataclass
class Sidecar:
    """One running ``muster agent`` and what it has logged."""

    process: asyncio.subprocess.Process
    address: str
    http_port: int
    c10d_port: int
    run_dir: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    async def get(self, path: str) -> tuple[int, str]:
        """Ask its HTTP server; 0 if nothing answers."""
        try:
            reader, writer = await asyncio.open_connection(self.address, self.http_port)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                answer = (await reader.read()).decode()
            finally:
                writer.close()
        except ConnectionError:
            return 0, ""
        head, ended, body = answer.partition("\r\n\r\n")
        # One that ends meanwhile may close the connection before it has answered.
        return (int(head.split()[1]), body) if ended else (0, "")

    async def until_ready(self) -> None:
        """Wait until it says that it is ready."""

        answer = (0, "")

        async def ready() -> bool:
            nonlocal answer
            assert self.process.returncode is None, self.lines
            answer = await self.get("/readyz")
            return answer[0] == 200

        try:
            await until(ready)
        except TimeoutError as error:
            error.add_note(f"/readyz: {answer}; its log: {self.lines}")
            raise

    async def until_logged(self, event: str) -> dict[str, Any]:
        """Wait for a line with this event; return the first one."""

        async def logged() -> bool:
            return any(line["event"] == event for line in self.lines)

        await until(logged)
        return next(line for line in self.lines if line["event"] == event)

    async def hosts(self) -> str:
        """What ``discover_hosts.sh`` prints."""
        process = await asyncio.create_subprocess_exec(
            self.run_dir / "discover_hosts.sh", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out.decode()

    async def until_hosts(self, count: int) -> None:
        """Wait until it prints so many hosts."""

        async def listed() -> bool:
            return len((await self.hosts()).splitlines()) == count + 1

        await until(listed)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@asynccontextmanager
async def sidecar(
    endpoint: str,
    run_dir: Path,
    name: str = "node-0",
    runner: tuple[str, ...] = PATIENT,
    /,
    **environ: str,
) -> AsyncIterator[Sidecar]:
    """Run a sidecar on free ports; kill it at the end if it still runs.

    ``runner`` are Python's arguments that run the command line.
    """
    http_port, c10d_port = free_ports(2)
    settings = {
        "MUSTER_JOB": "digits",
        "MUSTER_MEMBER": name,
        "MUSTER_MIN": "1",
        "MUSTER_MAX": "4",
        "MUSTER_ADDRESS": "127.0.0.1",
        "MUSTER_ETCD_ENDPOINTS": endpoint,
        "MUSTER_RUN_DIR": str(run_dir),
        "MUSTER_HTTP_PORT": str(http_port),
        "MUSTER_C10D_PORT": str(c10d_port),
        "MUSTER_LEASE_TTL": "600",
        **environ,
    }
    process = await started(("agent",), settings, runner)
    found = Sidecar(process, settings["MUSTER_ADDRESS"], http_port, c10d_port, run_dir)
    reading = asyncio.create_task(_read_lines(process, found.lines))
    try:
        yield found
    finally:
        await found.end(signal.SIGKILL)
        await reading


async def _read_lines(process: asyncio.subprocess.Process, lines: list[dict[str, Any]]) -> None:
    assert process.stderr is not None
    async for text in process.stderr:
        try:
            lines.append(json.loads(text))
        except ValueError:
            lines.append({"event": "not json", "message": text.decode()})


async def until(
    holds: Callable[[], bool | Awaitable[bool]], patience_s: float = PATIENCE_S
) -> None:
    """Wait until ``holds``, looking every 50 ms."""
    async with asyncio.timeout(patience_s):
        while True:
            held = holds()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.05)
