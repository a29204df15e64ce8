# SPDX-License-Identifier: Apache-2.0
"""A description of a connection's peer, for the log."""

from __future__ import annotations

import asyncio
import socket
from struct import Struct

_CREDENTIALS = Struct("3i")


def describe_peer(transport: asyncio.Transport) -> str:
    """Describe the peer: its address or, on a unix socket, process and user. Resolve nothing."""
    address = transport.get_extra_info("peername")
    if isinstance(address, tuple):
        return f"{address[0]}:{address[1]}"
    peer = transport.get_extra_info("socket")
    if peer is None:
        return "a unix client"
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return f"process {pid} of user {uid}"
