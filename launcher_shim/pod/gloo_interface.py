# SPDX-License-Identifier: Apache-2.0
"""The network interface for Gloo where the container's host name does not lead to the pod.

Gloo listens at the first address of the host name that this machine can bind, and at the loopback
if there is none: then ranks of two machines never meet. So it is in a pod of the host's network if
the node's name is not in the DNS, or stands for ``127.0.1.1``.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any, Dict, List, Mapping, Optional, Tuple

VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = ("127.", "::1")
RESOLVE_S = 5.0
"""Timeout for the host name: one that takes longer would hold up every rank."""

NETLINK_TIMEOUT_S = 2.0
_ROUTE, _GETADDR, _NEWADDR, _ERROR, _DONE = 0, 22, 20, 2, 3
_DUMP_REQUEST = 0x301
_ADDRESS, _LOCAL = 1, 2
_HEADER, _ENTRY, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")


def needed_interface(environ: Mapping[str, str], address: str) -> Optional[Tuple[str, str]]:
    """Look at this machine; return the interface to give to Gloo, and why. None: give none.

    ``address``: the pod's. Blocks for ``RESOLVE_S`` at most, and raises ``OSError`` if that is no
    address, or the machine does not tell.
    """
    if environ.get(VARIABLE) or _plain(address).startswith(LOOPBACK):
        return None
    interfaces, name = read_interfaces(), socket.gethostname()
    if _plain(address) not in interfaces:
        return None  # it is a router's, and no interface has it
    return decide(address, name, _bound_by(name), interfaces)


def decide(
    address: str, name: str, bound: Optional[str], interfaces: Mapping[str, str]
) -> Optional[Tuple[str, str]]:
    """Return the interface to give to Gloo, and why; None if it finds the one of ``address``.

    ``bound``: where it would listen by the host ``name``; None: nowhere. ``interfaces``: this
    machine's, by address.
    """
    own = interfaces[_plain(address)]
    if bound is not None and interfaces.get(_plain(bound)) == own:
        return None
    where = "does not resolve to" if bound is None else f"resolves to {bound}, not to"
    return own, (
        f"{VARIABLE}={own} is set: the host name {name} {where} {address}, where the other pods"
        " reach this one"
    )


def read_interfaces() -> Dict[str, str]:
    """Read the addresses of this machine from the kernel, each with its interface's name."""
    names = dict(socket.if_nameindex())
    found: Dict[str, str] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _ROUTE) as kernel:
        kernel.settimeout(NETLINK_TIMEOUT_S)
        entry = _ENTRY.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        kernel.sendto(
            _HEADER.pack(_HEADER.size + len(entry), _GETADDR, _DUMP_REQUEST, 1, 0) + entry, (0, 0)
        )
        while True:
            answer = kernel.recv(1 << 16)
            at = 0
            while at + _HEADER.size <= len(answer):
                length, kind, _, _, _ = _HEADER.unpack_from(answer, at)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return found
                if kind == _NEWADDR:
                    _note(answer[at + _HEADER.size : at + length], names, found)
                at += _aligned(length)


def _note(message: bytes, names: Mapping[int, str], found: Dict[str, str]) -> None:
    """Note the address in one message; a link between two has the other end's address, too."""
    index = _ENTRY.unpack_from(message)[4]
    addresses: Dict[int, bytes] = {}
    at = _ENTRY.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        addresses[kind] = message[at + _ATTRIBUTE.size : at + length]
        at += _aligned(length)
    packed = addresses.get(_LOCAL, addresses.get(_ADDRESS))
    if packed is not None and index in names:
        found.setdefault(_spelled(packed), names[index])


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _bound_by(name: str) -> Optional[str]:
    """Return the first address of the host ``name`` that can be bound, as Gloo chooses it."""
    found: List[Tuple[int, Tuple[Any, ...]]] = []
    # A thread of its own that nothing waits for: a resolver cannot be interrupted.
    resolving = threading.Thread(target=_resolve, args=(name, found), daemon=True)
    resolving.start()
    resolving.join(RESOLVE_S)
    return next((str(where[0]) for family, where in tuple(found) if _can_bind(family, where)), None)


def _resolve(name: str, found: "List[Tuple[int, Tuple[Any, ...]]]") -> None:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # no address: Gloo finds none either
    found += [(answer[0], answer[4]) for answer in answers]


def _can_bind(family: int, where: "Tuple[Any, ...]") -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _plain(address: str) -> str:
    """Spell an address as ``read_interfaces`` does; raises ``OSError`` if it is none."""
    text = address.partition("%")[0]
    return _spelled(socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text))


def _spelled(packed: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET6 if len(packed) == 16 else socket.AF_INET, packed)
