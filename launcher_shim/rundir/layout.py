# SPDX-License-Identifier: Apache-2.0
"""The meeting points of a pod's containers: files of the run directory, its sockets, the loopback.

Each name is defined only here. ``import muster`` has no part of Muster beside it: it repeats the
names that it reads or writes, and a test compares them. ``discover_hosts.sh`` repeats ``HOSTS``.
Whatever the other container has put in a file's place, no link is followed, and a pipe does not
block. A unix socket listens as soon as it has its name: it is bound under a nascent name, made
accessible to its clients, and renamed into place.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from typing import List, Tuple, Union

C10D_SOCKET = "c10d.sock"
"""Socket of the sidecar's rendezvous, for the relay of ``muster-run``."""
NOTICE_SOCKET = "notice.sock"
"""Socket on which the sidecar takes notices that the pod has to go."""
SHARDS_SOCKET = "shards.sock"
"""Socket on which ranks ask for shards of their data set."""
EXEC_SOCKET = "exec.sock"
"""Socket on which the pod takes the worker commands of the job's launcher."""
TUNNEL_SOCKET = "tunnel.sock"
"""In a launcher's pod: socket on which the sidecar takes commands for other pods."""

ENVIRONMENT = "env"
"""Variables for the training command, one ``NAME=VALUE`` a line."""
HOSTS = "hosts"
"""The host list for a launcher that asks for hosts."""
DISCOVER_HOSTS = "discover_hosts.sh"
"""Script that prints the host list."""
PROGRAMS = "bin"
"""Directory of the programs for the training container."""
TORCHRUN = "torchrun"
"""The program among them that comes before the image's own torchrun."""
MUSTER_RUN = "muster-run"
MUSTER_EXEC = "muster-exec"
"""The program that runs the worker commands of the job's launcher."""
KUBEXEC = "kubexec.sh"
"""In the run directory itself: the program that a launcher starts in the place of ssh."""
REMOTE_SHELL = "remote-shell"
"""Directory with an ``ssh`` that starts a launcher's workers through the sidecar; in no PATH but
the launcher's."""
MODULES = "python"
"""Directory of the modules for the training container."""
STARTUP = "sitecustomize.py"
"""In ``MODULES``: the module that each Python of the training container runs first."""

GATE_PAGE = "gate.page"
"""The gate: whether ranks may go on, wait or save at their next boundary."""
GATE = "gate.json"
"""The same for ranks whose ``import muster`` is of 0.1, as far as the disk has room for it."""
WORLD = "world"
"""The world of the ranks of a script that lets it change in place, and what they are to do."""
PROGRESS = "progress"
"""Directory with one file for each rank."""
IMPORTED = "progress/imported"
"""The name of the round (``MASTER_ADDR:MASTER_PORT``) whose ranks have imported ``muster``."""
LAUNCH = "launch"
"""Directory for the reports of ``muster-run``."""
LAUNCHER = "launcher.json"
"""In ``LAUNCH``: the launcher that runs below ``muster-run``."""
PLAIN_STARTS = "launch/plain"
"""Directory with the reason for each local rank, by its number, that started without the zygote."""
STACKS_ASKED = "stacks-asked.json"
"""The ranks whose stacks the sidecar asks ``muster-run`` for."""
STACKS = "stacks.json"
"""In ``LAUNCH``: the answer of ``muster-run``."""
RANK_ERRORS = "rank-errors"
"""Directory with the newest error of each local rank."""
WORKERS = "workers"
"""Directory with one file for each worker command of the job's launcher that runs."""

LOCK = "lock"
"""Held by the sidecar; names its member and process."""
STATE = "state.json"
"""The sidecar's identity and registration, for the sidecar that comes after it."""
STAGES = "stages.json"
"""The stages of the container's command that have ended."""
MASTERS = "masters.json"
"""The master's address of each of the newest worlds, by which its ranks know it."""
DRAIN = "drain.json"
"""This pod's own drain."""


def read_untrusted(path: "Union[str, os.PathLike[str]]", max_bytes: int) -> bytes:
    """Read at most ``max_bytes``; empty for a pipe without data.

    Raises ``OSError``, with ``ELOOP`` for a link.
    """
    with open(path, "rb", buffering=0, opener=_open) as file:
        return file.read(max_bytes) or b""


def open_regular(path: "Union[str, os.PathLike[str]]", flags: int, mode: int) -> int:
    """Open a regular file for writing, as ``os.open`` does, and return its descriptor.

    Raises ``OSError``, with ``ELOOP`` for a link; also for a pipe, with or without a reader.

    No link is followed, and a pipe in the file's place does not block.
    """
    descriptor = _open(path, flags | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "%s is no regular file" % os.path.basename(path))
    return descriptor


def _open(path: "Union[str, os.PathLike[str]]", flags: int, mode: int = 0) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, mode)


PATH_MAX_BYTES = 107
"""Maximum length of the path of a unix socket on Linux."""


class PathTooLong(ValueError):
    """The run directory's path leaves no room for a socket's name; the message says which."""


def nascent_name(path: str) -> str:
    """Return the name to bind, before ``path`` takes its place; raises ``PathTooLong``.

    It is bound under a nascent name, made accessible to its clients, and renamed into place.
    """
    nascent = f"{path}.{os.getpid()}"
    if len(os.fsencode(nascent)) > PATH_MAX_BYTES:
        raise PathTooLong(f"{path} is too long for a unix socket: choose a shorter run directory")
    return nascent


def publish_socket(nascent: str, path: str, mode: int) -> int:
    """Give a listening socket its mode and its name; return its inode. Raises ``OSError``."""
    os.chmod(nascent, mode)
    os.rename(nascent, path)
    return os.stat(path).st_ino


def withdraw_socket(path: str, inode: int) -> None:
    """Remove the socket with that inode, but not that of a successor; raises ``OSError``."""
    with suppress(FileNotFoundError):
        if os.stat(path).st_ino == inode:
            os.unlink(path)


ADDRESSES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))

_NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
_PORT_TRIES = 16


def bind_loopback(port: int) -> List[socket.socket]:
    """Bind 127.0.0.1 and, if the machine has it, ::1; port 0 chooses one that both have free.

    Raises ``OSError``: with ``EADDRINUSE``, and the address as its ``filename``, if it is taken.
    """
    tries = 1 if port else _PORT_TRIES
    while True:
        tries -= 1
        try:
            return _bind_both(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not tries:
                raise


def _bind_both(port: int) -> List[socket.socket]:
    (family, address), (family6, address6) = ADDRESSES
    first = _bind(family, address, port)
    try:
        return [first, _bind(family6, address6, first.getsockname()[1])]
    except OSError as error:
        if error.errno in _NO_IPV6:
            return [first]
        first.close()
        raise


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((address, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, error.strerror, address) from error
    return bound


def socket_of(path: str, listens: bool) -> Tuple[int, int]:
    """Identify the sidecar whose socket is at ``path``: each makes its own.

    ``listens``: only if it still listens. If it does not, or there is none, the result equals no
    other.
    """
    try:
        if listens:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                probe.connect(path)
    except BlockingIOError:
        pass  # it is there, and busy
    except OSError:
        return (-1, 0)
    try:
        status = os.stat(path)
    except OSError:
        return (-1, 1)
    return (status.st_ino, status.st_ctime_ns)
