# SPDX-License-Identifier: Apache-2.0
"""Certificates and their authorities: of the webhook, of the store's members and of its clients.

Keys and certificates are made here, from the time and a random number generator: cert-manager is
not needed. The webhook's authority signs the following certificates, too, so that trust in it need
not change. Members and clients of the store have separate authorities: otherwise a member would
accept a client's certificate as that of a peer. A client's common name is its user.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rdzv.errors import ConfigError

AUTHORITY_DAYS = 3650
LEAF_DAYS = 90
"""Lifetime of a certificate, in days. It is renewed in the last third, so that the controller may
be away for a month."""
SKEW = timedelta(hours=1)
"""Tolerance for clock skew between machines: a certificate is valid from before its issue."""

UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)
"""Exceptions of the library for foreign input: no PEM, or a key of an unsupported kind."""

MEMBER_DAYS = 730
"""Lifetime of the members' certificate, in days; renewed at two thirds. Members reread it for each
connection."""
SPARE = timedelta(days=60)
"""Lifetime of a client's certificate beyond its rotation, in case the controller is away then."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The authority with its key, and the certificate with its key, all as PEM."""

    authority: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes


def due(held: Pair | None, names: Sequence[str], now: datetime) -> str | None:
    """Return why a new certificate is due, as a sentence; None while ``held`` is good."""
    if held is None:
        return "there is none yet"
    try:
        leaf = x509.load_pem_x509_certificate(held.certificate)
        authority = x509.load_pem_x509_certificate(held.authority)
        key = load_pem_private_key(held.key, None)
        alternatives = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        leaf.verify_directly_issued_by(authority)
        belongs = leaf.public_key() == key.public_key()
    except InvalidSignature:
        belongs = False
    except (*UNREADABLE, x509.ExtensionNotFound) as error:
        return f"the one that is kept cannot be read: {error}"
    if not belongs:
        return "its parts do not belong together"
    told = alternatives.get_values_for_type(x509.DNSName)
    if set(told) != set(names):
        return f"it is for {', '.join(told)}"
    if now >= renewal(held):
        return f"it ends at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    return None


def renewal(held: Pair) -> datetime:
    """Return the time of renewal: after two thirds of the certificate's life."""
    leaf = x509.load_pem_x509_certificate(held.certificate)
    return leaf.not_valid_after_utc - (leaf.not_valid_after_utc - leaf.not_valid_before_utc) / 3


def make_pair(held: Pair | None, names: Sequence[str], now: datetime) -> Pair:
    """Issue a certificate, by the held authority while that outlives it, else by a new one."""
    return _issued(held, now, LEAF_DAYS, names[0][:64], [x509.DNSName(one) for one in names])


def make_members(held: Pair | None, hosts: Sequence[str], now: datetime) -> Pair:
    """Make the members' certificate; reuse the authority of ``held`` while it is usable."""
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    names = [*map(x509.DNSName, hosts), loopback]
    return _issued(held, now, MEMBER_DAYS, "etcd", names, ExtendedKeyUsageOID.CLIENT_AUTH)


def _issued(
    held: Pair | None,
    now: datetime,
    days: int,
    name: str,
    alternatives: Sequence[x509.GeneralName],
    *usages: x509.ObjectIdentifier,
) -> Pair:
    """Issue a server's certificate; ``usages``: what it is for besides."""
    authority, authority_key = authority_of(held, now)
    key = ec.generate_private_key(ec.SECP256R1())
    leaf = (
        builder(now, timedelta(days=days), key.public_key())
        .subject_name(subject(name))
        .issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName(alternatives), False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, *usages]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .sign(authority_key, hashes.SHA256())
    )
    return Pair(
        authority.public_bytes(Encoding.PEM),
        pem(authority_key),
        leaf.public_bytes(Encoding.PEM),
        pem(key),
    )


def authority_of(
    held: Pair | None, now: datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the held authority and its key while they are usable, else new ones.

    The authority signs the following certificates, too, so that trust in it need not change.
    """
    if held is not None:
        try:
            certificate = x509.load_pem_x509_certificate(held.authority)
            key = load_pem_private_key(held.authority_key, None)
            outlives = certificate.not_valid_after_utc > now + timedelta(days=LEAF_DAYS)
            if outlives and isinstance(key, ec.EllipticCurvePrivateKey):
                if key.public_key() != certificate.public_key():
                    raise ValueError("the key is not that of the authority")
                return certificate, key
        except UNREADABLE:
            pass  # an unreadable authority cannot sign: replace it
    key = ec.generate_private_key(ec.SECP256R1())
    name = subject(f"muster controller {now:%Y-%m-%d}")
    certificate = (
        builder(now, timedelta(days=AUTHORITY_DAYS), key.public_key())
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def builder(
    now: datetime, life: timedelta, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    """Start a certificate with a random serial number, its validity and its public key."""
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + life)
        .public_key(key)
    )


def subject(text: str) -> x509.Name:
    """Build a name with only a common name, of at most 64 characters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Serialize a key as unencrypted PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True, slots=True)
class ClientPair:
    """A client's certificate and key, as PEM."""

    certificate: bytes
    key: bytes


def make_clients_authority(now: datetime) -> tuple[bytes, bytes]:
    """Make an authority for clients; return its certificate and its key, as PEM."""
    certificate, key = authority_of(None, now)
    return certificate.public_bytes(Encoding.PEM), pem(key)


class ClientAuthority:
    """The authority that signs clients' certificates.

    Raises ``ConfigError`` if its certificate and key are unreadable or do not match.

    Members and clients have separate authorities: otherwise a member would accept a client's
    certificate as that of a peer.
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
