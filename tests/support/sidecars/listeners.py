# SPDX-License-Identifier: Apache-2.0
"""Who listens where on this machine, as the kernel tells it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that is listened on."""

    address: str
    port: int
    inode: str


def listeners() -> list[Listener]:
    """All of them; a machine without IPv6 has no table of such sockets."""
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        path = Path("/proc/net", table)
        if not path.exists():
            continue
        for line in path.read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                text, port = fields[1].split(":")
                words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
                address = socket.inet_ntop(family, b"".join(words))
                found.append(Listener(address, int(port, 16), fields[9]))
    return found


def listening_on(port: int) -> set[str]:
    """Addresses on which ``port`` is listened on."""
    return {each.address for each in listeners() if each.port == port}


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket that a process listens on."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return {(each.address, each.port) for each in listeners() if each.inode in inodes}


def loopbacks() -> set[str]:
    """The addresses of the loopback here: a machine without IPv6 has no ``::1``."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return {"127.0.0.1", "::1"}
    return {"127.0.0.1"}
