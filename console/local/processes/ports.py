# SPDX-License-Identifier: Apache-2.0
"""Free ports on this machine's loopback."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Set
from contextlib import ExitStack

from rdzv.errors import ConfigError

_RANGE = range(18000, 32000)
"""Below the range from which Linux and torch choose ports by themselves (32768 on), so that no
connection takes one between the choice and its use."""

_ATTEMPTS = 200


def free_ports(count: int, randomness: random.Random, given: Set[int] = frozenset()) -> list[int]:
    """Find ports on which nothing listens, neither on 127.0.0.1 nor on ::1.

    None of ``given``: the processes that those were chosen for may not listen yet. Raises
    ``ConfigError`` if there are too few.
    """
    with ExitStack() as held:
        ports: list[int] = []
        for _ in range(_ATTEMPTS):
            if len(ports) == count:
                return ports
            port = randomness.choice(_RANGE)
            if port in given:
                continue
            if all(_hold(family, address, port, held) for family, address in _loopbacks()):
                ports.append(port)
    raise ConfigError(f"no {count} free ports from {_RANGE.start} to {_RANGE.stop - 1}")


def _loopbacks() -> list[tuple[socket.AddressFamily, str]]:
    both = [(socket.AF_INET, "127.0.0.1")]
    if socket.has_ipv6:
        both.append((socket.AF_INET6, "::1"))
    return both


def _hold(family: socket.AddressFamily, address: str, port: int, held: ExitStack) -> bool:
    try:
        listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.bind((address, port))
    except OSError as error:
        # A machine without IPv6 has no ::1 to bind, and nobody else can either.
        return error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
