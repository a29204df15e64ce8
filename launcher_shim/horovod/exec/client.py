# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of a worker: what horovodrun starts in the place of ssh.

It hands the command to the agent of the host, passes output on with its streams kept apart, and
ends with the command's status. Where that cannot be known (the agent or its node is gone, the
connection is lost) it ends with 255, never with 0: one 0 ends a whole Horovod job. When this
process dies, however that happens, its connection does, and the agent ends the worker.
"""

from __future__ import annotations

import os
import re
import select
import socket
import sys
import time
from pathlib import Path
from typing import Mapping, Optional, Sequence

from launcher_shim.exit_status import EXIT_NOT_EXECUTABLE, EXIT_UNKNOWN
from launcher_shim.horovod.exec.exit_delay import delay_exit
from launcher_shim.horovod.exec.frames import (
    ALIVE,
    ALIVE_INTERVAL_S,
    EXIT,
    GONE,
    REFUSED,
    SILENCE_S,
    STDERR,
    STDOUT,
    Decoder,
    ExecFrameError,
    encode,
    encode_start,
    read_status,
)
from launcher_shim.rundir import layout

CONNECT_TIMEOUT_S = 5.0
"""A container that has just been started may need so long until its agent listens."""
CONNECT_INTERVAL_S = 0.1

OUTPUT_MAX = 1024 * 1024
"""Output in bytes that is held for a launcher that does not read it; then the worker waits."""
READ_SIZE = 64 * 1024

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_WITH_VALUE = ("-o", "-p", "-i")


class UsageError(ValueError):
    """A command line that horovodrun would not make: one sentence why."""


def read_arguments(arguments: Sequence[str]) -> tuple[str, str]:
    """Host and command, of ``HOST COMMAND`` as well as of Horovod's ssh line."""
    words = list(arguments)
    rest: list[str] = []
    while words:
        argument = words.pop(0)
        if argument in _WITH_VALUE and len(rest) < 2:
            del words[:1]
        elif argument.startswith("-") and not rest:
            raise UsageError("no option %s is known here" % argument)
        else:
            rest.append(argument)
    if len(rest) < 2:
        raise UsageError("say on which host, and what: kubexec.sh HOST COMMAND")
    if not _HOST.fullmatch(rest[0]):
        raise UsageError("%r is no host of the host list" % rest[0])
    return rest[0], " ".join(rest[1:])


def run_directory(environ: Mapping[str, str]) -> str:
    """The run directory: as ``MUSTER_RUN_DIR`` says, else where this program lies."""
    return environ.get("MUSTER_RUN_DIR") or os.path.dirname(os.path.realpath(sys.argv[0]))


def connect(host: str, environ: Mapping[str, str]) -> socket.socket:
    """Connect to what leads to the agent of ``host``; raises ``OSError`` if nothing listens there.

    It is that of the sidecar beside this process, or, where the agents' own sockets are within
    reach, the agent's.
    """
    workers = environ.get("MUSTER_WORKERS_DIR")
    if workers:
        path = os.path.join(workers, host, layout.EXEC_SOCKET)
    else:
        path = os.path.join(run_directory(environ), layout.TUNNEL_SOCKET)
    deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > deadline_s:
                raise
            time.sleep(CONNECT_INTERVAL_S)
        else:
            return connection


class CommandRelay:
    """One running command: bytes from the agent in, output and a status out."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = Decoder()
        self._output = {1: bytearray(), 2: bytearray()}
        self._unsent = bytearray()
        self._status: Optional[int] = None

    def run(self, start: bytes) -> int:
        """Relay to its end; raises ``OSError`` or ``ExecFrameError`` if it is cut short."""
        self._connection.setblocking(False)
        self._unsent += start
        read_s = alive_s = time.monotonic()
        while self._status is None or any(self._output.values()):
            now = time.monotonic()
            if now - alive_s >= ALIVE_INTERVAL_S:
                alive_s = now
                if not self._unsent:
                    self._unsent += encode(ALIVE)
            wants = self._status is None and sum(map(len, self._output.values())) < OUTPUT_MAX
            readable, writable, _ = select.select(
                [self._connection] if wants else [],
                [fd for fd, held in self._output.items() if held]
                + ([self._connection] if self._unsent and self._status is None else []),
                [],
                ALIVE_INTERVAL_S,
            )
            for fd in writable:
                self._write(fd)
            if readable:
                self._read()
            if readable or not wants:
                read_s = time.monotonic()
            elif time.monotonic() - read_s > SILENCE_S:
                raise OSError("nothing was heard for %g s" % SILENCE_S)
        return self._status

    def _write(self, fd: object) -> None:
        if isinstance(fd, int):
            # So much a pipe takes without blocking once it is writable.
            written = os.write(fd, bytes(self._output[fd][: select.PIPE_BUF]))
            del self._output[fd][:written]
        else:
            del self._unsent[: self._connection.send(self._unsent)]

    def _read(self) -> None:
        data = self._connection.recv(READ_SIZE)
        if not data:
            raise OSError("the connection was closed")
        for kind, body in self._decoder.feed(data):
            if kind == STDOUT:
                self._output[1] += body
            elif kind == STDERR:
                self._output[2] += body
            elif kind == EXIT:
                self._status = read_status(body)
            elif kind == REFUSED:
                self._output[2] += b"muster: " + body + b"\n"
                self._status = EXIT_NOT_EXECUTABLE
            elif kind == GONE:
                raise OSError(body.decode(errors="replace"))
            elif kind != ALIVE:
                raise ExecFrameError("the agent sent a frame of kind %d" % kind)


def main(arguments: Sequence[str]) -> int:
    """Run one worker's command; returns its status, ``EXIT_UNKNOWN`` where nobody knows it."""
    try:
        host, command = read_arguments(arguments)
        start = encode_start(host, command)
    except (UsageError, ExecFrameError) as error:
        return _fail(str(error))
    status = run_command(host, start)
    delay_exit(host, status, Path(run_directory(os.environ)))
    return status


def run_command(host: str, start: bytes) -> int:
    """Run one command on ``host``; returns its status, or ``EXIT_UNKNOWN``."""
    try:
        connection = connect(host, os.environ)
    except OSError as error:
        return _fail("the agent of host %s is not reached: %s" % (host, error))
    with connection:
        try:
            return CommandRelay(connection).run(start)
        except (OSError, ExecFrameError) as error:
            return _fail("how the worker on host %s ends is not known: %s" % (host, error))


def _fail(sentence: str) -> int:
    try:
        sys.stderr.write("muster: %s\n" % sentence)
        sys.stderr.flush()
    except OSError:
        return EXIT_UNKNOWN  # nobody reads it any longer
    return EXIT_UNKNOWN
