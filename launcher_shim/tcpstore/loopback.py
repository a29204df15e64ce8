# SPDX-License-Identifier: Apache-2.0
"""A port of the loopback in both address families; torch's client may try either first."""

from __future__ import annotations

import errno
import socket
from typing import List

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
