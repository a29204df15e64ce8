# SPDX-License-Identifier: Apache-2.0
"""One etcd member over a connection of Muster's own: its addresses in turn, TLS, calls."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from google.protobuf.message import DecodeError

from rdzv.pacing import Doubling
from rdzv.store.access import Access
from rdzv.store.etcd.answers import StatusCode, StatusError, explained
from rdzv.store.etcd.credentials import CertificateFiles
from rdzv.store.etcd.endpoint import (
    HAS_LEADER,
    RETIRE_S,
    WATCH,
    AnswerLostError,
    EtcdEndpoint,
    Metadata,
    Method,
    NotSentError,
    WatchCall,
)
from rdzv.store.http2.calls import CallFailedError, StreamCall
from rdzv.store.http2.connection import Http2Connection

NEXT_ADDRESS_S = 0.25
"""Time after which the next address of a name is tried besides, in seconds: one of several members
may be gone without a word."""

CONNECT_S = 3.0
"""Bound on an attempt to connect, in seconds: TCP, TLS and HTTP/2 take several round trips."""

RECONNECT = Doubling(0.1, 1.0)
"""Backoff after an attempt to connect that failed; calls meanwhile fail at once, as it did."""


async def connect(target: str, tls: ssl.SSLContext | None, timeout_s: float) -> Http2Connection:
    """Return a connection to ``host:port`` that works; raise ``CallFailedError``."""
    host, _, port = target.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await resolve(host, int(port))
            return await _first_of(addresses, host, int(port), target, tls)
    except TimeoutError:
        raise CallFailedError(f"no connection within {timeout_s:.1f} s", sent=False) from None


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name; raise ``CallFailedError``. An address needs no thread."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return [host]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:
        raise CallFailedError(f"DNS resolution failed: {error}", sent=False) from None
    return list(dict.fromkeys(str(one[4][0]) for one in found))


async def _first_of(
    addresses: list[str], host: str, port: int, target: str, tls: ssl.SSLContext | None
) -> Http2Connection:
    """Try each address a little after the one before, or at once when that has failed."""
    attempts: set[asyncio.Task[Http2Connection]] = set()
    left = addresses[:]
    why: CallFailedError | None = None
    try:
        while left or attempts:
            if left:
                one = _to_address(left.pop(0), host, port, target, tls)
                attempts.add(asyncio.create_task(one, name="connect to the store"))
            done, _ = await asyncio.wait(
                attempts,
                timeout=NEXT_ADDRESS_S if left else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for attempt in done:
                attempts.discard(attempt)
                error = attempt.exception()
                if error is None:
                    return attempt.result()
                if not isinstance(error, CallFailedError):
                    raise error
                why = error
    finally:
        for attempt in attempts:
            attempt.cancel()
        if attempts:
            await asyncio.wait(attempts)
            for attempt in attempts:
                if not attempt.cancelled() and attempt.exception() is None:
                    attempt.result().end("another address was faster")
    raise why or CallFailedError("the name has no address", sent=False)


async def _to_address(
    address: str, host: str, port: int, target: str, tls: ssl.SSLContext | None
) -> Http2Connection:
    loop = asyncio.get_running_loop()
    connection = Http2Connection("https" if tls else "http", target)
    try:
        await loop.create_connection(
            lambda: connection,
            address,
            port,
            ssl=tls,
            server_hostname=host if tls else None,
        )
    except (OSError, OverflowError) as error:
        # OpenSSL's errors are of the first kind, too; the second is of a port that cannot be.
        raise CallFailedError(
            f"failed to connect to all addresses; last error: {_said(error)}", sent=False
        ) from None
    try:
        await connection.settled_in()
    except asyncio.CancelledError:
        connection.end("this connection has no callers left")
        raise
    return connection


def _said(error: OSError | OverflowError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error)
    if isinstance(error, (ssl.SSLError, ConnectionResetError, BrokenPipeError)):
        # TCP itself is refused, or times out.
        return f"the TLS handshake failed: {str(error) or type(error).__name__}"
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


class Http2Watch:
    """A stream as a ``WatchCall``."""

    def __init__(self, stream: StreamCall) -> None:
        self._stream = stream

    async def write(self, request: Any) -> None:
        """Send a request; raise ``StatusError`` if the stream is over."""
        try:
            self._stream.write(request.SerializeToString())
        except CallFailedError as failed:
            raise _status_error(failed) from None

    async def read(self) -> Any:
        """Wait for a message; return None at the end, or raise ``StatusError``."""
        try:
            message = await self._stream.read()
        except CallFailedError as failed:
            raise _status_error(failed) from None
        return None if message is None else _parsed(WATCH, message)

    def cancel(self) -> None:
        """End the stream; a reader gets None."""
        self._stream.cancel()


class Http2Endpoint(EtcdEndpoint):
    """An ``EtcdEndpoint`` on HTTP/2 of our own: no thread, and it knows what was sent."""

    def __init__(self, target: str, files: CertificateFiles | None = None) -> None:
        super().__init__(target, files)
        self._current: Http2Connection | None = None
        self._former: set[Http2Connection] = set()
        self._connecting: asyncio.Task[Http2Connection] | None = None
        self._failures = 0
        self._why = ""
        self._not_before_s = float("-inf")

    async def call(
        self, method: Method, request: Any, timeout_s: float, metadata: Metadata = HAS_LEADER
    ) -> Any:
        """Make one attempt; raise ``NotSentError``, ``AnswerLostError``, ``StatusError``."""
        connection = self._current
        if connection is None or not connection.usable or self._files is not None:
            connection, timeout_s = await self._connected(timeout_s)
        message = request.SerializeToString()
        try:
            answer = await connection.unary(method.path, message, timeout_s, metadata)
        except CallFailedError as failed:
            if not failed.sent:
                raise NotSentError(explained(str(failed))) from None
            if failed.code is None:
                raise AnswerLostError(str(failed)) from None
            raise _status_error(failed) from None
        return _parsed(method, answer)

    def open_watch(
        self, on_kick: Callable[[str], None], metadata: Metadata = HAS_LEADER
    ) -> WatchCall:
        """Open a watch stream; ``on_kick`` is called, with the reason, to end it early."""
        self._on_kick.add(on_kick)
        assert self._current is not None
        return Http2Watch(self._current.stream(WATCH.path, metadata))

    def reconnect(self, grace_s: float = RETIRE_S) -> None:
        """Make later calls on a new connection; those under way have ``grace_s`` to end."""
        self.silent = False
        self.store_id = 0
        if self._closed:
            return
        self.connection = next(_connections)
        self._not_before_s = float("-inf")
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self._retire(grace_s)

    async def close(self) -> None:
        """Close the connection; calls that wait on it end."""
        self._closed = True
        self.kick("the store client is closed")
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        self._retire(0)
        for connection in self._former:
            connection.end("this client was closed")
        for connection in tuple(self._former):
            await connection.closed()

    def _retire(self, grace_s: float) -> None:
        self._former = {one for one in self._former if not one.ended}
        if self._current is not None:
            # It stays the current one until there is another: streams opened on it end at once.
            self._former.add(self._current)
            self._current.retire(grace_s)

    async def _connected(self, timeout_s: float) -> tuple[Http2Connection, float]:
        """Return a connection with the present certificates, and the time left.

        Raises ``NotSentError``.
        """
        loop = asyncio.get_running_loop()
        current = self._current
        timeout_s = await self._look(timeout_s, ready=current is not None and current.usable)
        deadline_s = loop.time() + timeout_s
        if self._files is not None and self._files.version != self._files_version:
            if self._current is not None:
                self.kick("the certificate files have changed")
            self.reconnect()
            self._files_version = self._files.version
        while True:
            if self._closed:
                raise NotSentError("this client was closed")
            current = self._current
            if current is not None and current.usable:
                return current, max(deadline_s - loop.time(), 0.001)
            if self._connecting is None:
                if loop.time() < self._not_before_s:
                    raise NotSentError(self._why)
                self._connecting = asyncio.create_task(self._connect(), name="store connection")
                self._connecting.add_done_callback(_note_end)
            connecting = self._connecting
            left_s = deadline_s - loop.time()
            done, _ = await asyncio.wait({connecting}, timeout=max(left_s, 0))
            if not done:
                raise NotSentError(f"no connection within {timeout_s:.1f} s")
            if connecting.cancelled():
                continue
            try:
                connecting.result()
            except CallFailedError:
                raise NotSentError(self._why) from None

    async def _connect(self) -> Http2Connection:
        """Make the one new connection that all calls wait for."""
        loop = asyncio.get_running_loop()
        try:
            connection = await connect(self.target, self._tls(), CONNECT_S)
        except CallFailedError as failed:
            self._why = explained(str(failed))
            self._not_before_s = loop.time() + RECONNECT.after(self._failures)
            self._failures += 1
            raise
        finally:
            if self._connecting is asyncio.current_task():
                self._connecting = None
        self._failures = 0
        self._retire(RETIRE_S)
        self._current = connection
        return connection

    def _tls(self) -> ssl.SSLContext | None:
        if self._files is None:
            return None
        found = self._files.certificates
        assert found is not None
        return found.context


def endpoints_of(access: Access) -> Sequence[EtcdEndpoint]:
    """Return an endpoint for each address of ``access``."""
    files = CertificateFiles(access) if access.tls else None
    return [Http2Endpoint(target, files) for target in access.targets]


_connections = count(1)


def _note_end(connecting: asyncio.Task[Http2Connection]) -> None:
    """Retrieve a failure whose callers have gone: asyncio would complain about it."""
    if not connecting.cancelled():
        connecting.exception()


def _parsed(method: Method, message: bytes) -> Any:
    try:
        return method.response.FromString(message)
    except DecodeError as error:
        raise StatusError(StatusCode.INTERNAL, f"the answer cannot be read: {error}") from None


def _status_error(failed: CallFailedError) -> StatusError:
    code = StatusCode.UNAVAILABLE if failed.code is None else StatusCode(failed.code)
    return StatusError(code, str(failed))
