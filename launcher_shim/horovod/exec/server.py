# SPDX-License-Identifier: Apache-2.0
"""The agent beside the workers of a Horovod job: starts and ends the launcher's commands.

It listens on a unix socket for its own user and the sidecar's. Each command is a session of its
own, which outlives its connection, as another one may follow. A command is ended when its
launcher's side is gone or starts another one in the same slot, and its true status is reported.
Python 3.8 and the standard library.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Coroutine, Dict, List, Mapping, Sequence, Set

from launcher_shim.exit_status import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from launcher_shim.horovod.exec.command import CommandError, WarmStarts, WorkerCommand, read_command
from launcher_shim.horovod.exec.session import OUTPUT_GRACE_S, CommandSession, Worker, start
from launcher_shim.rundir import layout
from launcher_shim.rundir.exec_frames import (
    ABANDON,
    ACK,
    GONE,
    HOLD,
    START,
    Decoder,
    ExecFrameError,
    Frame,
    encode,
    read_attaching,
    read_lease_ttl_s,
)
from launcher_shim.rundir.layout import nascent_name, publish_socket

OPENING_TIMEOUT_S = 10.0
READ_SIZE = 64 * 1024

_CREDENTIALS = struct.Struct("3i")


def listen(path: Path) -> socket.socket:
    """Open a listening socket at ``path``, where it appears only once it listens.

    Every user may connect; ``may_command`` decides which of them may use it.
    """
    nascent = nascent_name(str(path))
    with suppress(FileNotFoundError):
        os.unlink(nascent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(nascent)
    listener.listen(64)
    listener.setblocking(False)
    publish_socket(nascent, str(path), 0o666)
    return listener


def may_command(connection: socket.socket, delivered: Path) -> bool:
    """Return whether the peer runs as this user, as root, or as the sidecar.

    The sidecar's user is the owner of ``delivered``: by the ``PATH`` and ``PYTHONPATH`` in that
    file, it decides what runs here anyway.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid in (os.geteuid(), 0):
        return True
    try:
        found = delivered.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == uid


async def first_frames(reader: asyncio.StreamReader, decoder: Decoder) -> List[Frame]:
    """Read the first frame of a connection, and those that came with it.

    Raises ``ExecFrameError``, ``ConnectionError`` if the peer is gone, or ``asyncio.TimeoutError``
    after ``OPENING_TIMEOUT_S``.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + OPENING_TIMEOUT_S
    while True:
        data = await asyncio.wait_for(reader.read(READ_SIZE), deadline_s - loop.time())
        if not data:
            raise ConnectionError("disconnected before its first frame")
        frames = decoder.feed(data)
        if frames:
            return frames


class ExecServer:
    """The agent of one host; ``host`` is its name in the host list, ``environ`` the pod's own.

    ``run_dir`` holds the socket, and a note for each command that runs: the notes show the sidecar
    whether a drained pod still has work in it.
    """

    def __init__(
        self, host: str, environ: Mapping[str, str], run_dir: Path, warm: WarmStarts
    ) -> None:
        self._host = host
        self._environ = environ
        self._warm = warm
        self._path = run_dir / layout.EXEC_SOCKET
        self._notes = run_dir / layout.WORKERS
        self._delivered = run_dir / layout.ENVIRONMENT
        self._sessions: Dict[str, CommandSession] = {}
        self._workers: Dict[int, Worker] = {}
        self._starting: Dict[int, asyncio.Lock] = {}
        self._tasks: Set[asyncio.Task[None]] = set()
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
        told = [session.over.wait() for session in self._sessions.values()]
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*told), OUTPUT_GRACE_S * 2)

    def _look(self) -> None:
        for worker in tuple(self._workers.values()):
            worker.look()

    # -- connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if may_command(writer.get_extra_info("socket"), self._delivered):
                await self._converse(reader, writer)
        except (ExecFrameError, CommandError) as error:
            with suppress(ConnectionError):
                writer.write(encode(GONE, str(error).encode()))
                await writer.drain()
        except (ConnectionError, asyncio.TimeoutError):
            return  # the connection has ended; its session need not
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder()
        opening, *frames = await first_frames(reader, decoder)
        if opening.kind == HOLD:
            for held in self._sessions.values():
                held.hold()
            writer.write(encode(ACK))
            await writer.drain()
            return
        attaching = read_attaching(opening)
        session = self._sessions.get(attaching.session)
        if opening.kind == ABANDON:
            if session is not None:
                session.abandon("the launcher's side of the command has ended")
            writer.write(encode(ACK))
            await writer.drain()
            return
        if session is None:
            if attaching.acknowledged or attaching.received:
                raise ExecFrameError("the agent beside the worker knows no such command any more")
            session = self._sessions[attaching.session] = CommandSession(
                attaching.host, read_lease_ttl_s(self._environ.get("MUSTER_LEASE_TTL", ""))
            )
            self._keep(self._forget(attaching.session, session))
        session.attach(writer, attaching)
        try:
            while True:
                for frame in frames:
                    self._hear(session, frame)
                data = await reader.read(READ_SIZE)
                if not data:
                    return
                frames = decoder.feed(data)
        except ExecFrameError as error:
            session.abandon(str(error))
        finally:
            session.detach(writer)

    def _hear(self, session: CommandSession, frame: Frame) -> None:
        counting = session.hear(frame)
        if counting is None:
            return
        if counting.kind != START or counting.number != 1:
            raise ExecFrameError("a frame of kind %d cannot be told an agent" % counting.kind)
        self._keep(self._run(session, counting.body))

    async def _forget(self, name: str, session: CommandSession) -> None:
        await session.over.wait()
        del self._sessions[name]

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_event_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- commands

    async def _run(self, session: CommandSession, text: bytes) -> None:
        try:
            command = self._read(session, text)
        except CommandError as error:
            session.refuse(str(error))
            return
        slot = command.local_rank
        note = self._notes / ("%d.json" % slot)
        async with self._starting.setdefault(slot, asyncio.Lock()):
            before = self._workers.get(slot)
            if before is not None:
                await before.end()
                await before.ended.wait()
            if session.gone:
                return
            if self._stopping:
                session.refuse(self._about_to_leave)
                return
            try:
                note.touch()
            except OSError as error:
                # Without its note, it would not keep its pod from going away during a drain.
                session.refuse("the command cannot be recorded: %s" % error)
                return
            try:
                worker = start(command, self._environ, self._warm)
            except OSError as error:
                _forget_note(note)
                missing = isinstance(error, FileNotFoundError)
                status = EXIT_NOT_FOUND if missing else EXIT_NOT_EXECUTABLE
                session.fail("%s: %s\n" % (command.argv[0], error), status)
                return
            self._workers[slot] = worker
            worker.look()  # its SIGCHLD may have come before it was among the workers
        try:
            await session.follow(worker)
            if worker.status == 128 + signal.SIGKILL:
                await self._warm.settled()  # it was the stub: its worker may still hold a GPU
        finally:
            worker.finish()
            del self._workers[slot]
            worker.ended.set()
            _forget_note(note)

    def _read(self, session: CommandSession, text: bytes) -> WorkerCommand:
        command = read_command(text.decode("utf-8", "surrogateescape"))
        for host in (session.host, command.host):
            if host != self._host:
                raise CommandError("this is host %s, not %s" % (self._host, host))
        if self._stopping:
            raise CommandError(self._about_to_leave)
        return command

    @property
    def _about_to_leave(self) -> str:
        return "host %s is about to leave" % self._host


def forget_all(notes: Path) -> None:
    """Create the directory of notes, without those of an agent that ended before.

    If another file has its place, each command that cannot be noted is refused, with the reason.
    """
    with suppress(OSError):
        notes.mkdir(exist_ok=True)
        notes.chmod(0o755)  # for the sidecar, whatever the umask is
    for note in notes.glob("*.json"):
        _forget_note(note)


def _forget_note(note: Path) -> None:
    with suppress(OSError):  # removed already, or put there by another user of the pod
        note.unlink()


async def serve(host: str, run_dir: Path, warm: WarmStarts) -> None:
    """Serve ``host`` until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await ExecServer(host, os.environ, run_dir, warm).run(stop)


def main(arguments: Sequence[str]) -> int:
    """Serve as ``muster-run`` says: under the host's name and in the run directory.

    Both may be given: ``HOST RUN_DIR``. The words behind ``--`` are the container's command before
    injection, a sshd or a sleep, which is not run.
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
    asyncio.run(serve(host, Path(run_dir), WarmStarts.begun(os.environ, sys.path[0])))
    return EXIT_TERMINATED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
