# SPDX-License-Identifier: Apache-2.0
"""Ports for what a test is about to start."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterator
from itertools import cycle, islice

_RANGE = range(12000, 18000)
"""Below the ports that Linux gives to connections (32768 on) and those that ``muster local`` draws
(18000 on), so that nobody takes one between the choice and its use."""


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on at any address; none comes again before all others have."""
    ports = list(islice(filter(_is_free, islice(_candidates, len(_RANGE))), count))
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


def _is_free(port: int) -> bool:
    return _binds(socket.AF_INET, port) and _binds(socket.AF_INET6, port)


def _binds(family: socket.AddressFamily, port: int) -> bool:
    try:
        with socket.socket(family) as listener:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(("", port))
    except OSError as error:
        # A machine without IPv6 has nobody there who could hold the port.
        return error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


_candidates = _own()
