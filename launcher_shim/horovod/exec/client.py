# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of a worker: the program that horovodrun starts in the place of ssh.

It hands the command to the agent of the host, passes its output on with the streams kept apart, and
ends with the command's status. If a connection is cut, it reconnects, and nothing is lost: the
sidecars on the way may be killed or replaced while the command runs. If it cannot be known how the
command ends (its agent, its node or the way to it is gone) it ends with 255, never with 0: one 0
ends a whole Horovod job. When this process dies, the sidecar beside it has the worker ended.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Callable

from launcher_shim.exit_status import EXIT_NOT_EXECUTABLE, EXIT_REMOVED, EXIT_UNKNOWN
from launcher_shim.rundir import layout
from launcher_shim.rundir.exec_frames import (
    ATTACHED,
    EXIT,
    GONE,
    REFUSED,
    START,
    STDERR,
    STDOUT,
    Attaching,
    Decoder,
    ExecFrameError,
    Frame,
    Stream,
    delivered_lease_ttl_s,
    encode_attaching,
    patience_s,
    read_status,
)

SEEN_S = 5.0
"""Time after which horovodrun has read a list: it polls every 1.4 s or so."""
LIMIT_S = 600.0
"""Time for which horovodrun waits for enough hosts by default."""
LOOK_S = 0.2


def delay_exit(
    host: str,
    status: int,
    run_dir: Path,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until horovodrun may learn that a worker on ``host`` ended with ``status``.

    ``run_dir`` is the launcher's, with the host list and the job's min.

    While fewer hosts than min are listed, horovodrun keeps all workers waiting. A worker that
    ends then would count as the first of those that gather for the next change, once there are
    enough again: that change would begin without one of the others, and they would wait for
    each other. Once horovodrun has followed a list without the host, it ignores that end.
    """
    if status in (0, EXIT_REMOVED):
        return
    began_s = since_s = now_s()
    while now_s() < min(since_s + SEEN_S, began_s + LIMIT_S):
        try:
            listed, least = _listed(run_dir), _least(run_dir)
        except (OSError, ValueError):
            return  # not a run directory of a launcher
        if host in listed:
            return
        if len(listed) < least:
            since_s = now_s()
        sleep(LOOK_S)


def _listed(run_dir: Path) -> set[str]:
    """Read the hosts that have slots."""
    lines = (run_dir / layout.HOSTS).read_text().splitlines()
    return {host for host, _, slots in (line.partition(":") for line in lines) if slots != "0"}


def _least(run_dir: Path) -> int:
    """Read the least number of nodes; raises ``ValueError`` if it is not there."""
    for line in (run_dir / layout.ENVIRONMENT).read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "PET_NNODES":
            return int(value.partition(":")[0])
    raise ValueError("the least number of nodes is not told")


_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_WITH_VALUE = ("-o", "-p", "-i")


class UsageError(ValueError):
    """A command line that horovodrun would not write: one sentence why."""


def read_arguments(arguments: list[str]) -> tuple[str, str]:
    """Parse ``HOST COMMAND``, or Horovod's ssh line; raises ``UsageError``."""
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
    host = rest[0]
    if not _NAME.issuperset(host) or host[:1] in ("", ".", "_", "-"):
        raise UsageError("%r is no host of the host list" % host)
    return host, " ".join(rest[1:])


CONNECT_INTERVAL_S = 0.1

READ_SIZE = 256 * 1024


class UnknownEnd(Exception):
    """It is not known how the command ends: one sentence why."""


class RemoteCommand:
    """One command on ``host``, over as many connections as it takes."""

    def __init__(self, host: str, command: str) -> None:
        self._host = host
        self._session = os.urandom(16).hex()
        self._attempt = 0
        self._stream = Stream()
        self._stream.send(START, command.encode("utf-8", "surrogateescape"))
        self._attached = False

    def run(self) -> int:
        """Run the command and return its status; raises ``UnknownEnd``."""
        sought_s, why = 0.0, "nothing listens there"
        limit_s: float = CONNECT_INTERVAL_S
        while sought_s < limit_s:
            self._attached = False
            began_s = time.monotonic()
            try:
                with connect(self._host) as connection:
                    return self._converse(connection)
            except OSError as error:
                why = error.strerror or str(error)
                # By then, an agent that has heard nothing has ended the command.
                limit_s = patience_s(delivered_lease_ttl_s(run_directory()))
            # A sidecar that is there answers for the way on, as soon as it knows of one.
            stood_s = time.monotonic() - began_s
            sought_s = 0.0 if self._attached else max(0.0, sought_s - stood_s)
            time.sleep(CONNECT_INTERVAL_S)
            # Counted by intervals, so that a time in which this machine stood still does not count.
            sought_s += CONNECT_INTERVAL_S
        raise UnknownEnd("there is no way to host %s (%s)" % (self._host, why))

    def _converse(self, connection: socket.socket) -> int:
        self._attempt += 1
        stream = self._stream
        attaching = Attaching(
            self._host, self._session, self._attempt, stream.acknowledged, stream.received
        )
        connection.sendall(encode_attaching(attaching))
        decoder = Decoder()
        while True:
            data = connection.recv(READ_SIZE)
            if not data:
                raise OSError("the connection was closed")
            status = None
            heard = stream.received
            try:
                for frame in decoder.feed(data):
                    if not self._attached:
                        self._begin(connection, frame)
                    elif status is None:
                        status = self._hear(frame)
            except ExecFrameError as error:
                sentence = "what came from host %s is wrong: %s" % (self._host, error)
                raise UnknownEnd(sentence) from error
            if status is not None:
                self._acknowledge_last(connection)
                return status
            if stream.received > heard:
                connection.sendall(stream.acknowledgement())

    def _begin(self, connection: socket.socket, frame: Frame) -> None:
        if frame.kind == GONE:
            raise UnknownEnd(frame.body.decode(errors="replace"))
        if frame.kind != ATTACHED:
            raise ExecFrameError("a frame of kind %d came before the first answer" % frame.kind)
        for data in self._stream.resume(frame.number):
            connection.sendall(data)
        self._attached = True

    def _hear(self, frame: Frame) -> int | None:
        if frame.kind == GONE:
            raise UnknownEnd(frame.body.decode(errors="replace"))
        counting = self._stream.receive(frame)
        if counting is None:
            return None
        if counting.kind == STDOUT:
            write(1, counting.body)
        elif counting.kind == STDERR:
            write(2, counting.body)
        elif counting.kind == EXIT:
            return read_status(counting.body)
        elif counting.kind == REFUSED:
            write(2, b"muster: " + counting.body + b"\n")
            return EXIT_NOT_EXECUTABLE
        else:
            raise ExecFrameError("the agent sent a frame of kind %d" % counting.kind)
        return None

    def _acknowledge_last(self, connection: socket.socket) -> None:
        try:
            connection.sendall(self._stream.acknowledgement())
        except OSError:
            return  # the agent waits only as long as for a launcher that is gone


def write(fd: int, data: bytes) -> None:
    """Write all of ``data``, however slow its reader is; raises ``UnknownEnd`` if there is none."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError as error:
            raise UnknownEnd("nobody reads the output: %s" % error) from error


def run_directory() -> str:
    """Return the run directory: ``MUSTER_RUN_DIR``, or the folder of this program."""
    return os.environ.get("MUSTER_RUN_DIR") or os.path.dirname(os.path.realpath(sys.argv[0]))


def connect(host: str) -> socket.socket:
    """Connect towards the agent of ``host``; raises ``OSError`` if nothing listens.

    The connection is to the sidecar beside this process, or, if the agents' own sockets can be
    reached (``MUSTER_WORKERS_DIR``), to the agent.
    """
    workers = os.environ.get("MUSTER_WORKERS_DIR")
    if workers:
        path = os.path.join(workers, host, layout.EXEC_SOCKET)
    else:
        path = os.path.join(run_directory(), layout.TUNNEL_SOCKET)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def main(arguments: list[str]) -> int:
    """Run one worker's command; return its status, or ``EXIT_UNKNOWN`` if it is not known."""
    try:
        host, command = read_arguments(arguments)
        remote = RemoteCommand(host, command)
    except (UsageError, ExecFrameError) as error:
        return _fail(str(error))
    try:
        status = remote.run()
    except UnknownEnd as error:
        status = _fail("how the worker on host %s ends is not known: %s" % (host, error))
    if status:
        # Imported only here: the start of a worker need not wait for it.
        from pathlib import Path

        delay_exit(host, status, Path(run_directory()))
    return status


def _fail(sentence: str) -> int:
    try:
        sys.stderr.write("muster: %s\n" % sentence)
        sys.stderr.flush()
    except OSError:
        return EXIT_UNKNOWN  # stderr has no reader any more
    return EXIT_UNKNOWN
