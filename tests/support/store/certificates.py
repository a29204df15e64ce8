# SPDX-License-Identifier: Apache-2.0
"""A certificate authority for tests, and the files that it signs."""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Key = ec.EllipticCurvePrivateKey

SERVER = ExtendedKeyUsageOID.SERVER_AUTH
CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH


class Authority:
    """Signs certificates into ``folder``; files are renamed into place, as a rotation does."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(f"muster tests {name}")
        self.cacert = folder / f"{name}.pem"
        builder = _builder(self._name, self._name, self._key.public_key(), timedelta(days=1))
        self.certificate = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        ).sign(self._key, hashes.SHA256())
        write(self.cacert, self.pem)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def server(
        self, name: str = "server", *, host: str = "localhost", ip: str = "127.0.0.1"
    ) -> tuple[Path, Path]:
        """For a member: its certificate, good as a server alone, and its key."""
        names = [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address(ip))]
        return self._sign(name, name, SERVER, names, timedelta(hours=1))

    def client(
        self, common_name: str, name: str = "client", life: timedelta = timedelta(hours=1)
    ) -> tuple[Path, Path]:
        """For a client: its certificate and key. A negative life makes one out of date."""
        return self._sign(common_name, name, CLIENT, [], life)

    def _sign(
        self,
        common_name: str,
        name: str,
        usage: x509.ObjectIdentifier,
        names: list[x509.GeneralName],
        life: timedelta,
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(common_name), self._name, key.public_key(), life)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        paths = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        write(paths[0], certificate.public_bytes(serialization.Encoding.PEM))
        write(
            paths[1],
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        return paths


def write(path: Path, content: bytes) -> None:
    """Write a file of ours alone and rename it into place."""
    fresh = path.with_suffix(".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    fresh.replace(path)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + life)
    )
