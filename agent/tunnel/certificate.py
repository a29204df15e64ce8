# SPDX-License-Identifier: Apache-2.0
"""Makes a key with its certificate, and prints both as PEM: a program of its own.

The library that does it would otherwise stay in the sidecar's memory. The certificate has a key and
no name: the member's record, which has its digest, says whose it is.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NO_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""The date for "no end" of RFC 5280: the key ends with its sidecar."""
CLOCK_SKEW = timedelta(days=365)
"""Tolerance for another machine's clock that is behind."""


def make_pem() -> bytes:
    """Generate a key of the curve P-256, and its certificate; return both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "muster")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - CLOCK_SKEW)
        .not_valid_after(NO_END)
        .sign(key, hashes.SHA256())
    )
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)


if __name__ == "__main__":
    sys.stdout.buffer.write(make_pem())
