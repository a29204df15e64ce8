# SPDX-License-Identifier: Apache-2.0
"""The first message of both ends of a tunnel connection: the sender's certificate. No sockets here.

It is sent in clear and proves nothing: it tells the other end which certificate the TLS that
follows has to use. The end that is called answers only if it knows the caller's pin.
"""

from __future__ import annotations

from struct import Struct

from rdzv.errors import LauncherError

MAGIC = b"muster/1"
CERTIFICATE_MAX = 1024
"""Longest certificate in bytes: three times the size of Muster's own."""

_HEAD = Struct(f">{len(MAGIC)}sH")
HEAD_SIZE = _HEAD.size


class HelloError(LauncherError):
    """Bytes that are no hello: one sentence why."""


def encode_hello(certificate: bytes) -> bytes:
    """Encode the message for one certificate in DER."""
    return _HEAD.pack(MAGIC, len(certificate)) + certificate


def read_head(head: bytes) -> int:
    """Return the length of the certificate that follows; raise ``HelloError`` if it is invalid."""
    magic, length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise HelloError("it began with no certificate")
    if not 1 <= length <= CERTIFICATE_MAX:
        raise HelloError(f"it began with a certificate of {length} bytes")
    return int(length)
