# SPDX-License-Identifier: Apache-2.0
"""The agent beside the workers of a Horovod job: starts what the launcher sends, and ends it.

It listens on a unix socket for its own user and the sidecar's. Each command is a session of its
own; it is ended when the launcher's side of it is gone, silent, or starts another one in the same
slot, and its true status is told. Python 3.8 and the standard library.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Mapping, Optional, Sequence

from launcher_shim.exit_status import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from launcher_shim.horovod.exec.command import (
    CommandError,
    WorkerCommand,
    merge_environment,
    read_command,
)
from launcher_shim.horovod.exec.frames import (
    ALIVE,
    ALIVE_INTERVAL_S,
    EXIT,
    REFUSED,
    SILENCE_S,
    START,
    STDERR,
    STDOUT,
    Decoder,
    ExecFrameError,
    encode,
    read_start,
)
from launcher_shim.rundir import layout
from launcher_shim.rundir.unix_socket import nascent_name, publish

TERM_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL of a worker whose client is gone."""
OUTPUT_GRACE_S = 2.0
"""How long to read output after the end, from other processes that hold the pipe."""
READ_SIZE = 32 * 1024

_CREDENTIALS = struct.Struct("3i")


class Worker:
    """One running command. ``exited`` is set once its first process has ended.

    ``abandoned``: its client is gone, and its exit status is not reported. ``terminating``: SIGTERM
    was sent while it ran; an exit status of 0 does not mean that its work is done.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.exited = asyncio.Event()
        self.ended = asyncio.Event()
        self.status: Optional[int] = None
        self.moved = 0
        self.blocked = 0
        self.draining = asyncio.Lock()
        self.abandoned = False
        self.terminating = False

    def look(self) -> None:
        """See whether the process has ended; its id stays taken until ``finish``."""
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

    async def end(self) -> None:
        """Send SIGTERM, and SIGKILL after the grace."""
        self.look()  # one that has ended by itself was not terminated
        if not self.exited.is_set():
            self.terminating = True
        self.signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.exited.wait(), TERM_GRACE_S)
        self.signal(signal.SIGKILL)
        await self.exited.wait()


class ExecServer:
    """Serves one host; ``host`` is its name in the host list, ``environ`` the pod's own.

    ``run_dir`` takes the socket, and a note for each command that runs: by them the sidecar knows
    whether a drained pod still has work in it.
    """

    def __init__(self, host: str, environ: Mapping[str, str], run_dir: Path) -> None:
        self._host = host
        self._environ = environ
        self._path = run_dir / layout.EXEC_SOCKET
        self._notes = run_dir / layout.WORKERS
        self._environment = run_dir / layout.ENVIRONMENT
        self._workers: dict[int, Worker] = {}
        self._starting: dict[int, asyncio.Lock] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set; then end every worker and report its status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._look)
        forget_all(self._notes)
        server = await asyncio.start_unix_server(self._serve, sock=listen(self._path))
        await stop.wait()
        self._stopping = True
        server.close()
        await asyncio.gather(*(worker.end() for worker in tuple(self._workers.values())))
        if self._connections:
            await asyncio.wait(self._connections, timeout=OUTPUT_GRACE_S * 2)

    def _look(self) -> None:
        for worker in tuple(self._workers.values()):
            worker.look()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if may_command(writer.get_extra_info("socket"), self._environment):
                await self._serve_launcher(reader, writer)
        except (ConnectionError, asyncio.TimeoutError):
            return  # the client disconnected before anything was started
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve_launcher(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        decoder = Decoder()
        try:
            command = self._read_start(await first_frame(reader, decoder))
        except (ExecFrameError, CommandError) as error:
            await refuse(writer, str(error))
            return
        slot = command.local_rank
        async with self._starting.setdefault(slot, asyncio.Lock()):
            before = self._workers.get(slot)
            if before is not None:
                await before.end()
                await before.ended.wait()
            note = self._notes / ("%d.json" % slot)
            try:
                note.touch()
            except OSError as error:
                # Unnoted, it would not keep its pod from going away amid a drain.
                await refuse(writer, "the command cannot be recorded: %s" % error)
                return
            try:
                worker = Worker(start(command, self._environ))
            except OSError as error:
                note.unlink(missing_ok=True)
                missing = isinstance(error, FileNotFoundError)
                status = EXIT_NOT_FOUND if missing else EXIT_NOT_EXECUTABLE
                writer.write(encode(STDERR, ("%s: %s\n" % (command.argv[0], error)).encode()))
                writer.write(encode(EXIT, b"%d" % status))
                await writer.drain()
                return
            self._workers[slot] = worker
            worker.look()  # its SIGCHLD may have come before it was among the workers
        try:
            await follow(worker, reader, writer, decoder)
        finally:
            del self._workers[slot]
            worker.ended.set()
            note.unlink(missing_ok=True)  # the container's user may have removed it

    def _read_start(self, frame: tuple[int, bytes]) -> WorkerCommand:
        kind, body = frame
        if kind != START:
            raise ExecFrameError("the first frame is no start")
        host, text = read_start(body)
        command = read_command(text)
        if not host == command.host == self._host:
            raise CommandError("this is host %s, not %s" % (self._host, host))
        if self._stopping:
            raise CommandError("host %s is about to leave" % self._host)
        return command


async def follow(
    worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: Decoder
) -> None:
    """Relay one worker to its end, or to that of the launcher's side of it."""
    loop = asyncio.get_running_loop()
    gone = loop.create_task(until_gone(reader, decoder))
    sending = loop.create_task(_send_output(worker, writer))
    try:
        await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            worker.abandoned = True
            await worker.end()
    finally:
        for task in (gone, sending):
            task.cancel()
        await asyncio.wait((gone, sending))
        worker.finish()
    if not sending.cancelled():
        with suppress(OSError):  # the launcher's side ended a moment before the worker
            sending.result()


async def _send_output(worker: Worker, writer: asyncio.StreamWriter) -> None:
    """Send the worker's output as it comes, and then its status."""
    loop = asyncio.get_running_loop()
    pumps = {
        loop.create_task(_pump(worker, pipe, kind, writer))
        for pipe, kind in ((worker.process.stdout, STDOUT), (worker.process.stderr, STDERR))
    }
    alive = loop.create_task(_send_alive(writer))
    try:
        await worker.exited.wait()
        status = worker.finish()
        pending = pumps
        while pending:
            moved = worker.moved
            _, pending = await asyncio.wait(pending, timeout=OUTPUT_GRACE_S)
            if worker.moved == moved and not worker.blocked:
                break
        # One that was frozen would read it when it wakes, or not: for it the end is not known.
        if not worker.abandoned:
            writer.write(encode(EXIT, b"%d" % status))
            await writer.drain()
    finally:
        for task in (alive, *pumps):
            task.cancel()
        await asyncio.wait((alive, *pumps))
        for pump in pumps:
            if not pump.cancelled():
                with suppress(OSError):
                    pump.result()


async def _pump(worker: Worker, pipe: object, kind: int, writer: asyncio.StreamWriter) -> None:
    """Send one stream of the worker; a launcher that does not read makes the worker wait."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_SIZE)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while True:
            data = await reader.read(READ_SIZE)
            if not data:
                return
            writer.write(encode(kind, data))
            worker.blocked += 1
            try:
                async with worker.draining:  # before Python 3.10 only one may wait at a time
                    await writer.drain()
            finally:
                worker.blocked -= 1
            worker.moved += len(data)
    finally:
        transport.close()


async def _send_alive(writer: asyncio.StreamWriter) -> None:
    while True:
        # Bytes that are still to be read say the same.
        if not writer.transport.get_write_buffer_size():
            writer.write(encode(ALIVE))
        await asyncio.sleep(ALIVE_INTERVAL_S)


async def first_frame(reader: asyncio.StreamReader, decoder: Decoder) -> tuple[int, bytes]:
    """The first frame of a connection; raises ``ExecFrameError``, or ``OSError`` if it is gone."""
    deadline_s = time.monotonic() + SILENCE_S
    while True:
        data = await asyncio.wait_for(reader.read(READ_SIZE), deadline_s - time.monotonic())
        if not data:
            raise ConnectionError("disconnected before its first frame")
        frames = decoder.feed(data)
        if frames:
            return frames[0]


async def until_gone(reader: asyncio.StreamReader, decoder: Decoder) -> None:
    """Return when the launcher's side is gone, silent for too long, or talks nonsense."""
    with suppress(OSError, ExecFrameError, asyncio.TimeoutError):
        while True:
            data = await asyncio.wait_for(reader.read(READ_SIZE), SILENCE_S)
            if not data or any(frame.kind != ALIVE for frame in decoder.feed(data)):
                return


def start(command: WorkerCommand, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; raises ``OSError``."""
    return subprocess.Popen(
        command.argv,
        cwd=command.directory if os.path.isdir(command.directory) else None,
        env=merge_environment(environ, command.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def listen(path: Path) -> socket.socket:
    """A listening socket at ``path``, there at once whole; who may use it, ``may_command`` says."""
    nascent = nascent_name(str(path))
    with suppress(FileNotFoundError):
        os.unlink(nascent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(nascent)
    listener.listen(64)
    listener.setblocking(False)
    publish(nascent, str(path), 0o666)
    return listener


async def refuse(writer: asyncio.StreamWriter, sentence: str) -> None:
    """Say why a command is not started; raises ``ConnectionError`` if nobody listens."""
    writer.write(encode(REFUSED, sentence.encode()))
    await writer.drain()


def forget_all(notes: Path) -> None:
    """Make the directory of notes, without those of an agent that ended before."""
    notes.mkdir(exist_ok=True)
    notes.chmod(0o755)  # for the sidecar, whatever the umask is
    for note in notes.glob("*.json"):
        note.unlink()


def may_command(connection: socket.socket, environment: Path) -> bool:
    """Whether the peer runs as this user, as root, or as the sidecar.

    The sidecar's user is the one that owns ``environment``: by what that file says of ``PATH`` and
    ``PYTHONPATH``, it decides what runs here anyway.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid in (os.geteuid(), 0):
        return True
    try:
        found = environment.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == uid


async def serve(host: str, run_dir: Path) -> None:
    """Serve ``host`` until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await ExecServer(host, os.environ, run_dir).run(stop)


def main(arguments: Sequence[str]) -> int:
    """Serve as ``muster-run`` tells: under the host's name and in the run directory.

    Both may be given: ``HOST RUN_DIR``. What stands behind ``--`` is what the container had for a
    command before injection, a sshd or a sleep, and is not run.
    """
    arguments = list(arguments)
    if "--" in arguments:
        del arguments[arguments.index("--") :]
    told = [os.environ.get(name, "") for name in ("MUSTER_HOST", "MUSTER_RUN_DIR")]
    host, run_dir = arguments or told
    if not host or not run_dir:
        sys.stderr.write(
            "muster-exec: MUSTER_HOST or MUSTER_RUN_DIR is not set: start it by muster-run --\n"
        )
        return EXIT_USAGE
    asyncio.run(serve(host, Path(run_dir)))
    return EXIT_TERMINATED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
