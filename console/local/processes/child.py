# SPDX-License-Identifier: Apache-2.0
"""Children of this process: started with a log file, ended within a deadline."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping, Sequence
from pathlib import Path


async def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start ``command`` in a session of its own, so that Ctrl-C reaches only this process."""
    output = await asyncio.to_thread(log.open, "ab")
    with output:
        return await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )


async def end(process: Process, timeout_s: float) -> int:
    """Send SIGTERM, and SIGKILL after ``timeout_s``; return the exit status."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
