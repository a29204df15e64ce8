# SPDX-License-Identifier: Apache-2.0
"""The two ways into a pod's processes that are no plain files: a Unix socket, and the gate's page.

The socket is for every user of the pod, and served until cancelled. The page is a file of fixed
size that is allocated once, and overwritten in place: ``muster/gate.py`` maps it in the training
container. A change is written to the slot that the present content is not in; then the generation
word names that slot. With it goes when the environment file was written (ns): a sidecar of 0.1
writes that file as it starts, and knows no page, so a page that names another one is no longer in
force.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import stat
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from launcher_shim.rundir.layout import PathTooLong, nascent_name, open_regular, publish_socket
from rdzv.errors import ConfigError
from rdzv.sentences import named

WORD = struct.Struct("<Q")
HEAD = struct.Struct("<IIq")
SLOT_BYTES = 8192
FIRST_SLOT = 64
PAGE_BYTES = FIRST_SLOT + 2 * SLOT_BYTES

_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_GLOBAL = 1


class GatePage:
    """The page at ``path``. Every method may block for as long as the disk does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self) -> None:
        """Allocate the page, unless it is there; raise ``OSError`` if there is no room for it.

        One that is there is kept, with its content: ranks have mapped it.
        """
        with suppress(OSError):
            os.close(self._open(os.O_RDONLY))
            return
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o644)
        try:
            os.fchmod(descriptor, 0o644)  # whatever the umask is
            _write(descriptor, bytes(PAGE_BYTES), 0)
            os.fsync(descriptor)  # only then has every file system given it its blocks
            os.replace(temporary, self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def content(self) -> tuple[bytes, int] | None:
        """Read the content, and the environment that it names; None if nothing whole is there."""
        try:
            descriptor = self._open(os.O_RDONLY)
        except OSError:
            return None
        try:
            page = os.pread(descriptor, PAGE_BYTES, 0)
        finally:
            os.close(descriptor)
        (word,) = WORD.unpack_from(page)
        start = FIRST_SLOT + (word & 1) * SLOT_BYTES
        checksum, length, environment_ns = HEAD.unpack_from(page, start)
        start += HEAD.size
        content = page[start : start + min(length, SLOT_BYTES - HEAD.size)]
        if not content or zlib.crc32(content, zlib.crc32(page[: WORD.size])) != checksum:
            return None
        return content, environment_ns

    def put(self, content: bytes, environment_ns: int) -> None:
        """Change the content; raise ``OSError`` if that fails.

        Ranks that look from now on see it, and whatever a rank has written before it looked at the
        former one is in its progress file.
        """
        if len(content) > SLOT_BYTES - HEAD.size:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self._path))
        try:
            descriptor = self._open(os.O_RDWR)
        except OSError:  # something else has taken its place
            self.make()
            descriptor = self._open(os.O_RDWR)
        try:
            (word,) = WORD.unpack(os.pread(descriptor, WORD.size, 0))
            packed = WORD.pack((word + 1) % 2**64)
            checksum = zlib.crc32(content, zlib.crc32(packed))
            slot = FIRST_SLOT + ((word + 1) & 1) * SLOT_BYTES
            head = HEAD.pack(checksum, len(content), environment_ns)
            _write(descriptor, head + content, slot)
            _write(descriptor, packed, 0)
        finally:
            os.close(descriptor)
        _fence()

    def _open(self, flags: int) -> int:
        """Open the page; raise ``OSError`` if what is there is not one that only we can change."""
        descriptor = open_regular(self._path, flags, 0o644)
        found = os.fstat(descriptor)
        shown = (stat.S_IMODE(found.st_mode), found.st_uid, found.st_nlink, found.st_size)
        if shown != (0o644, os.geteuid(), 1, PAGE_BYTES):
            os.close(descriptor)
            raise OSError(errno.EINVAL, f"{self._path.name} is no page of this user")
        return descriptor


def _write(descriptor: int, content: bytes, offset: int) -> None:
    if os.pwrite(descriptor, content, offset) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fence() -> None:
    """Let no processor order a rank's look at the page before what the rank wrote first.

    The rank has no fence in Python. Where the kernel has none either (gVisor), the system calls
    around its write have to do.
    """
    number = _MEMBARRIER.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _GLOBAL, 0, 0)


ServeConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening_at(path: Path, serve: ServeConnection, limit: int) -> AsyncIterator[None]:
    """Listen on ``path`` for as long as the block lasts; connections outlive it.

    A client that finds the socket can connect to it. ``limit`` is asyncio's, in bytes. Raises
    ``ConfigError`` if the path is too long for a socket.
    """
    try:
        nascent = nascent_name(str(path))
    except PathTooLong as error:
        raise ConfigError(f"{named('--run-dir')}: {error}") from error
    await asyncio.to_thread(Path(nascent).unlink, missing_ok=True)
    server = await asyncio.start_unix_server(serve, nascent, limit=limit)
    try:
        # The containers of a pod have different users, and no other pod has this directory.
        await asyncio.to_thread(publish_socket, nascent, str(path), 0o666)
        yield
    finally:
        server.close()


class PodSocket:
    """A server on the socket ``path``; None: it does not listen.

    ``serve`` has a connection until it returns. Connections beyond ``connections_max`` at once are
    closed. ``limit`` is asyncio's, in bytes.
    """

    def __init__(
        self, path: Path | None, serve: ServeConnection, *, limit: int, connections_max: int
    ) -> None:
        self.listening = asyncio.Event()
        self._path = path
        self._serve = serve
        self._limit = limit
        self._connections_max = connections_max
        self._clients: dict[asyncio.Task[object], asyncio.StreamWriter] = {}

    async def run(self) -> None:
        """Serve until cancelled; raise ``ConfigError`` if the path is too long for a socket."""
        if self._path is None:
            self.listening.set()
            await asyncio.Event().wait()
            return
        try:
            async with listening_at(self._path, self._connected, self._limit):
                self.listening.set()
                await asyncio.Event().wait()
        finally:
            # Each task sees its connection end; a task of asyncio's server must not be cancelled.
            for writer in self._clients.values():
                writer.close()
            await asyncio.gather(*self._clients, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        try:
            if len(self._clients) <= self._connections_max:
                await self._serve(reader, writer)
        finally:
            del self._clients[task]
            writer.close()
