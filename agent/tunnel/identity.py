# SPDX-License-Identifier: Apache-2.0
"""The key of one sidecar's end of the tunnel, and the certificate it trusts for one connection.

A new key is made at each start, and is kept in memory only. No authority signs its certificate: the
member's record carries the certificate's digest, the pin, and each connection trusts exactly the
one certificate whose pin is that of a present member.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import sys
from hashlib import sha256
from pathlib import Path

import agent
from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError
from rdzv.sentences import named

MAKE_TIMEOUT_S = 60.0
"""Time limit for another Python to start and make a key on a busy machine, in seconds."""

_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+-----END CERTIFICATE-----\n"
)


def pin_of(certificate: bytes) -> str:
    """Return the pin of a certificate in DER: its SHA-256, in hexadecimal."""
    return sha256(certificate).hexdigest()


@dataclass(frozen=True, slots=True, repr=False)
class TunnelIdentity:
    """A key with its certificate, ``pem``; ``certificate`` is the latter in DER."""

    pem: bytes
    certificate: bytes

    @property
    def pin(self) -> str:
        """The pin of the certificate, which the member's record carries."""
        return pin_of(self.certificate)

    def context(self, trusted: bytes, *, server: bool) -> ssl.SSLContext:
        """Build a TLS 1.3 context with this key, for the peer whose certificate is ``trusted``.

        Raises ``ssl.SSLError`` if ``trusted`` is no certificate.
        """
        protocol = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is known to the byte
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # no session is resumed: each connection proves its key
        context.load_verify_locations(cadata=trusted)
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        """Load the key from an unnamed file in memory, as ssl takes files only."""
        descriptor = os.memfd_create("muster-key", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, self.pem)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


async def make_identity() -> TunnelIdentity:
    """Make a key in a process of its own; raise ``ConfigError`` if that fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "agent.tunnel.certificate"),
        # Only this process knows where the program's packages are installed.
        env={**os.environ, "PYTHONPATH": str(Path(agent.__file__).parent.parent)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(MAKE_TIMEOUT_S):
            pem, error = await process.communicate()
    except TimeoutError:
        pem, error = b"", b"no answer in time"
    finally:  # also if the sidecar is stopped meanwhile
        if process.returncode is None:
            process.kill()
            await process.wait()
    identity = None if process.returncode else read_identity(pem)
    if identity is None:
        lines = error.decode(errors="replace").split("\n")
        why = next((line for line in reversed(lines) if line), "it said nothing")
        raise ConfigError(
            f"{named('--tunnel-port')}: no key can be made ({why}): install the package"
            " cryptography, or say 0 for no tunnel"
        )
    return identity


def read_identity(pem: bytes) -> TunnelIdentity | None:
    """Read a key with its certificate; return None if there is no certificate."""
    found = _CERTIFICATE.search(pem)
    return TunnelIdentity(pem, ssl.PEM_cert_to_DER_cert(found[0].decode())) if found else None
