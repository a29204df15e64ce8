# SPDX-License-Identifier: Apache-2.0
"""Ports for what a test is about to start."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections import deque
from collections.abc import Iterator
from itertools import cycle, islice

_RANGE = range(12000, 18000)
"""Below the ports that Linux gives to connections (32768 on) and those that ``muster local`` draws
(18000 on)."""

_RESERVED_MAX = 200


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on at any address; none comes again before all others have.

    The newest stay bound here, and nobody takes one between the choice and its use: horovodrun's
    services draw from all ports above 1023. Who is to listen on one must set ``SO_REUSEADDR``, as
    servers do.
    """
    ports = list(islice(filter(_reserve, islice(_candidates, len(_RANGE))), count))
    assert len(ports) == count, f"no {count} free ports in {_RANGE}"
    return ports


def _own() -> Iterator[int]:
    """The part of the range that the other processes of these tests leave to this one, for ever."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    length = len(_RANGE) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = _RANGE[worker * length : (worker + 1) * length]
    # Not all from the first on: somebody may be testing another copy at the same time.
    start = random.randrange(length)
    return cycle((*own[start:], *own[:start]))


def _reserve(port: int) -> bool:
    reservation = socket.socket()
    if not (_binds(reservation, port) and _is_free_in_ipv6(port)):
        reservation.close()
        return False
    # Only now: with it, the port of somebody else's reservation would have passed as free.
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved.append(reservation)
    if len(_reserved) > _RESERVED_MAX:
        _reserved.popleft().close()
    return True


def _is_free_in_ipv6(port: int) -> bool:
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            return _binds(listener, port)
    except OSError as error:
        # A machine without IPv6 has nobody there who could hold the port.
        return error.errno == errno.EAFNOSUPPORT


def _binds(listener: socket.socket, port: int) -> bool:
    try:
        listener.bind(("", port))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return True


_reserved: deque[socket.socket] = deque()
_candidates = _own()
