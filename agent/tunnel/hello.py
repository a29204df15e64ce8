# SPDX-License-Identifier: Apache-2.0
"""The first message of both ends of a tunnel connection: the sender's certificate. No sockets here.

It is sent in clear and proves nothing: it tells the other end which certificate the TLS that
follows has to be of. The end that is called answers only if it knows the caller's pin.
"""

from __future__ import annotations

from struct import Struct

from rdzv.errors import LauncherError

MAGIC = b"muster/1"
CERTIFICATE_MAX = 1024
"""Longest certificate in bytes: three times what one of ours has."""

_HEAD = Struct(f">{len(MAGIC)}sH")
HEAD_SIZE = _HEAD.size


class HelloError(LauncherError):
    """Bytes that are no hello: one sentence why."""


def encode_hello(certificate: bytes) -> bytes:
    """The message for one certificate in DER."""
    return _HEAD.pack(MAGIC, len(certificate)) + certificate


def read_head(head: bytes) -> int:
    """How long the certificate is that follows; raises ``HelloError``."""
    magic, length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise HelloError("it began with no certificate")
    if not 1 <= length <= CERTIFICATE_MAX:
        raise HelloError(f"it began with a certificate of {length} bytes")
    return int(length)
