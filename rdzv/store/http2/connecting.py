# SPDX-License-Identifier: Apache-2.0
"""The way to a connection: the addresses of a name in turn, TLS, and the server's settings."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import suppress

from rdzv.store.http2.calls import CallFailedError
from rdzv.store.http2.connection import Http2Connection

NEXT_ADDRESS_S = 0.25
"""Time after which the next address of a name is tried besides, in seconds: one of several members
may be gone without a word."""


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
