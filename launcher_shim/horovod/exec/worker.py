# SPDX-License-Identifier: Apache-2.0
"""One running command of a Horovod launcher: its processes, its status and its output."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from typing import Callable, Mapping, Optional, cast

from launcher_shim.exit_status import EXIT_TERMINATED
from launcher_shim.horovod.exec.command import WorkerCommand, merge_environment
from launcher_shim.horovod.exec.warm import WarmStarts

TERM_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL of a worker that is to end, if its launcher's side is
there."""
OUTPUT_GRACE_S = 2.0
"""Time without output, in seconds, after which reading ends: other processes may hold the pipe."""


class Worker:
    """One running command. ``exited`` is set once its first process has ended.

    ``terminating``: SIGTERM was sent while it ran; an exit status of 0 does not mean that its work
    is done.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.exited = asyncio.Event()
        self.ended = asyncio.Event()
        self.status: Optional[int] = None
        self.terminating = False

    def look(self) -> None:
        """Check whether the process has ended; its id stays taken until ``finish``."""
        if not self.exited.is_set():
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.process.pid, options) is not None:
                self.exited.set()

    def signal(self, number: signal.Signals) -> None:
        """Signal every process of the command."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def finish(self) -> int:
        """Kill the processes that the first one has left; return its status as a shell would.

        A worker that got SIGTERM and ended with 0 counts as terminated (143): one 0 ends a whole
        Horovod job.
        """
        if self.status is None:
            self.signal(signal.SIGKILL)
            code = self.process.wait()
            self.status = 128 - code if code < 0 else code
            if self.terminating and not self.status:
                self.status = EXIT_TERMINATED
        return self.status

    async def end(self, grace_s: float = TERM_GRACE_S) -> None:
        """Send SIGTERM, and SIGKILL ``grace_s`` later."""
        self.look()  # one that has ended by itself was not terminated
        if not self.exited.is_set():
            self.terminating = True
        self.signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.exited.wait(), grace_s)
        self.signal(signal.SIGKILL)
        await self.exited.wait()


def start(command: WorkerCommand, environ: Mapping[str, str], warm: WarmStarts) -> Worker:
    """Start a command in a session of its own; raises ``OSError``."""
    environ = merge_environment(environ, command.environment)
    return Worker(
        subprocess.Popen(
            warm.words(command.argv, environ),
            cwd=command.directory if os.path.isdir(command.directory) else None,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    )


class Output(asyncio.Protocol):
    """One stream of a worker's output; ``take`` gets it, and returns whether there is room.

    ``ended`` is set at its end, ``moved`` counts bytes, and ``waits`` is true while it is not read,
    until ``go_on``: then the worker waits, once its pipe is full.
    """

    def __init__(self, take: Callable[[bytes], bool]) -> None:
        self.ended = asyncio.Event()
        self.moved = 0
        self.waits = False
        self._take = take
        self._transport: Optional[asyncio.ReadTransport] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the pipe's transport."""
        self._transport = cast(asyncio.ReadTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass output on."""
        self.moved += len(data)
        if not self._take(data) and self._transport is not None:
            self.waits = True
            self._transport.pause_reading()

    def connection_lost(self, _: Optional[Exception]) -> None:
        """Note the end of the pipe."""
        self.ended.set()

    def go_on(self) -> None:
        """Read again, if reading was paused."""
        if self.waits and self._transport is not None:
            self.waits = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Stop reading."""
        if self._transport is not None:
            self._transport.close()
