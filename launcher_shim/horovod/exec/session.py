# SPDX-License-Identifier: Apache-2.0
"""One command of a launcher, as the agent beside the workers sees it, over all its connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import List, Optional, Set

from launcher_shim.horovod.exec.attaching import Attaching
from launcher_shim.horovod.exec.frames import (
    ATTACHED,
    EXIT,
    GONE,
    REFUSED,
    STDERR,
    STDOUT,
    ExecFrameError,
    Frame,
    encode,
)
from launcher_shim.horovod.exec.lease import ABANDONED_GRACE_S, detached_max_s
from launcher_shim.horovod.exec.stream import Stream
from launcher_shim.horovod.exec.worker import OUTPUT_GRACE_S, Output, Worker


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
