# SPDX-License-Identifier: Apache-2.0
"""Certificates of the store's members and of its clients; a client's common name is its user.

Members and clients have separate authorities: otherwise a member would accept a client's
certificate as that of a peer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from controller.certificates.pair import UNREADABLE, Pair, authority_of, builder, pem, subject
from rdzv.errors import ConfigError

MEMBER_DAYS = 730
"""Lifetime of the members' certificate, in days; renewed at two thirds. Members reread it for each
connection."""
SPARE = timedelta(days=60)
"""Lifetime of a client's certificate beyond its rotation, in case the controller is away then."""


@dataclass(frozen=True, slots=True)
class ClientPair:
    """A client's certificate and key, as PEM."""

    certificate: bytes
    key: bytes


def make_members(held: Pair | None, hosts: Sequence[str], now: datetime) -> Pair:
    """Make the members' certificate; reuse the authority of ``held`` while it is usable."""
    authority, authority_key = authority_of(held, now)
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts]
    alternatives.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    leaf = (
        builder(now, timedelta(days=MEMBER_DAYS), key.public_key())
        .subject_name(subject("etcd"))
        .issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName(alternatives), False)
        .add_extension(x509.ExtendedKeyUsage(usages), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .sign(authority_key, hashes.SHA256())
    )
    encoded = Encoding.PEM
    return Pair(
        authority.public_bytes(encoded), pem(authority_key), leaf.public_bytes(encoded), pem(key)
    )


def make_clients_authority(now: datetime) -> tuple[bytes, bytes]:
    """Make an authority for clients; return its certificate and its key, as PEM."""
    certificate, key = authority_of(None, now)
    return certificate.public_bytes(Encoding.PEM), pem(key)


class ClientAuthority:
    """The authority that signs clients' certificates.

    Raises ``ConfigError`` if its certificate and key are unreadable or do not match.
    """

    def __init__(self, certificate: bytes, key: bytes) -> None:
        try:
            self._certificate = x509.load_pem_x509_certificate(certificate)
            loaded = load_pem_private_key(key, None)
        except UNREADABLE as error:
            raise ConfigError(
                f"the authority of the store's clients is of no use: {error}"
            ) from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
            raise ConfigError("the key of the store's clients' authority is neither EC nor RSA")
        if loaded.public_key() != self._certificate.public_key():
            raise ConfigError("the authority of the store's clients and its key are no pair")
        self._key = loaded

    def sign(self, user: str, life: timedelta, now: datetime) -> ClientPair:
        """Sign a certificate for the client ``user``; it does not outlive the authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        life = min(life, self._certificate.not_valid_after_utc - now)
        certificate = (
            builder(now, life, key.public_key())
            .subject_name(subject(user))
            .issuer_name(self._certificate.subject)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .sign(self._key, hashes.SHA256())
        )
        return ClientPair(certificate.public_bytes(Encoding.PEM), pem(key))

    def fault(self, held: ClientPair, user: str, now: datetime) -> str:
        """Return why ``user`` cannot use a certificate, as a sentence; empty if it is valid.

        A certificate that ends within a day is not valid.
        """
        try:
            leaf = x509.load_pem_x509_certificate(held.certificate)
            key = load_pem_private_key(held.key, None)
            leaf.verify_directly_issued_by(self._certificate)
        except (InvalidSignature, *UNREADABLE) as error:
            return f"its certificate is of no use: {str(error) or type(error).__name__}"
        (name,) = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME) or (None,)
        if name is None or name.value != user:
            return "its certificate is another user's"
        if leaf.public_key() != key.public_key():
            return "its certificate and its key are no pair"
        if now >= leaf.not_valid_after_utc - timedelta(days=1):
            return "its certificate ends"
        return ""
