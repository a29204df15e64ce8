# SPDX-License-Identifier: Apache-2.0
"""One command of a launcher: its processes, status and output, over all its connections."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from typing import Callable, List, Mapping, Optional, Set, cast

from launcher_shim.exit_status import EXIT_TERMINATED
from launcher_shim.horovod.exec.command import WarmStarts, WorkerCommand, merge_environment
from launcher_shim.rundir.exec_frames import (
    ABANDONED_GRACE_S,
    ATTACHED,
    EXIT,
    GONE,
    REFUSED,
    STDERR,
    STDOUT,
    Attaching,
    ExecFrameError,
    Frame,
    Stream,
    detached_max_s,
    encode,
)

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


class CommandSession:
    """One command. ``gone``: why its end is not reported any more; empty while it is.

    ``lease_ttl_s`` is that of the sidecars, in whole seconds. ``over``: the command has ended, and
    the launcher's side has acknowledged that, or never will.
    """

    def __init__(self, host: str, lease_ttl_s: int) -> None:
        self.host = host
        self._detached_max_s = detached_max_s(lease_ttl_s)
        self.gone = ""
        self.over = asyncio.Event()
        self.worker: Optional[Worker] = None
        self._stream = Stream()
        self._attempt = 0
        self._writer: Optional[asyncio.StreamWriter] = None
        self._outputs: List[Output] = []
        self._last_word = False
        self._patience: Optional[asyncio.Task[None]] = None
        self._silent_s = 0
        self._ending: Set[asyncio.Task[None]] = set()

    # -- its connections

    def attach(self, writer: asyncio.StreamWriter, attaching: Attaching) -> None:
        """Go on with a new connection; raises ``ExecFrameError`` if it is no newer one."""
        if attaching.attempt <= self._attempt:
            raise ExecFrameError("connection %d of it has been here before" % attaching.attempt)
        again = self._stream.resume(attaching.received)
        self._attempt = attaching.attempt
        if self._writer is not None:
            self._writer.transport.abort()
        if self._patience is not None:
            self._patience.cancel()
        self._writer = writer
        writer.write(encode(ATTACHED, b"", self._stream.received))
        writer.writelines(again)
        self._go_on()

    def detach(self, writer: asyncio.StreamWriter) -> None:
        """Note that a connection has ended, which need not mean that the launcher's side has."""
        if self._writer is writer:
            self._writer = None
            self._patience = asyncio.get_event_loop().create_task(self._outlast())

    def hold(self) -> None:
        """Count the launcher's silence anew: nobody can tell whether it is there."""
        self._silent_s = 0

    def hear(self, frame: Frame) -> Optional[Frame]:
        """Take a frame; return it if it counts. Raises ``ExecFrameError``."""
        counting = self._stream.receive(frame)
        if counting is not None and self._writer is not None:
            self._writer.write(self._stream.acknowledgement())
        self._go_on()
        return counting

    async def _outlast(self) -> None:
        self._silent_s = 0
        while self._silent_s < self._detached_max_s:
            await asyncio.sleep(1.0)  # by seconds, so a stop of this process does not count
            self._silent_s += 1
        self.abandon("nothing was heard of the launcher's side for %d s" % self._detached_max_s)

    def abandon(self, why: str) -> None:
        """End the command without a report: the launcher's side of it is gone."""
        if self.gone or self.over.is_set():
            return
        self.gone = why
        self._tell_gone()
        if self.worker is None or self._last_word:
            self.over.set()
        else:
            ending = self.worker.end(ABANDONED_GRACE_S)
            self._ending.add(asyncio.get_event_loop().create_task(ending))

    # -- its reports

    def refuse(self, sentence: str) -> None:
        """Report why the command is not started."""
        self._say_last(REFUSED, sentence.encode())

    def fail(self, sentence: str, status: int) -> None:
        """Report that it could not be started, as a shell would."""
        self._send(STDERR, sentence.encode())
        self._say_last(EXIT, b"%d" % status)

    async def follow(self, worker: Worker) -> None:
        """Send the worker's output as it comes, and then its status."""
        self.worker = worker
        loop = asyncio.get_event_loop()
        for pipe, kind in ((worker.process.stdout, STDOUT), (worker.process.stderr, STDERR)):
            output = Output(lambda data, kind=kind: self._send(kind, data))  # type: ignore[misc]
            await loop.connect_read_pipe(lambda output=output: output, pipe)  # type: ignore[misc]
            self._outputs.append(output)
        await worker.exited.wait()
        status = worker.finish()
        await self._read_to_the_end()
        for output in self._outputs:
            output.close()
        if self.gone:
            self.over.set()
        else:
            self._say_last(EXIT, b"%d" % status)

    async def _read_to_the_end(self) -> None:
        while not all(output.ended.is_set() for output in self._outputs):
            moved = sum(output.moved for output in self._outputs)
            ends = [output.ended.wait() for output in self._outputs]
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*ends), OUTPUT_GRACE_S)
            waits = not self.gone and any(output.waits for output in self._outputs)
            if moved == sum(output.moved for output in self._outputs) and not waits:
                return

    def _send(self, kind: int, body: bytes) -> bool:
        """Send a frame, now or with the next connection; return whether there is room for more."""
        if self.gone:
            return True  # no side wants it, and the worker may end
        data = self._stream.send(kind, body)
        if self._writer is not None:
            self._writer.write(data)
        return self._stream.has_room

    def _say_last(self, kind: int, body: bytes) -> None:
        self._last_word = True
        self._send(kind, body)
        if self.gone:
            self.over.set()

    def _go_on(self) -> None:
        if self.gone:
            self._tell_gone()
        elif self._last_word and self._stream.all_acknowledged:
            self.over.set()
            self._close()
        if self._stream.has_room or self.gone:
            for output in self._outputs:
                output.go_on()

    def _tell_gone(self) -> None:
        if self._writer is not None:
            self._writer.write(encode(GONE, self.gone.encode()))
        self._close()
        for output in self._outputs:
            output.go_on()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._patience is not None:
            self._patience.cancel()
