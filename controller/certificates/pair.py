# SPDX-License-Identifier: Apache-2.0
"""A webhook's certificate with its key, and the authority that signed it; and whether it is due.

Everything is made here, of the time and a random number generator's keys: no cert-manager is
needed. The authority signs the next certificates, too, so that what trusts it need not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
LEAF_DAYS = 90
"""Of which the last third is for renewing: the controller may be away for a month."""
SKEW = timedelta(hours=1)
"""Clocks of a cluster's machines differ: a certificate is good from before it was made."""

UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)
"""What the library raises for what somebody else wrote: no PEM, a key of a kind it has not."""


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM texts: the authority with its key, and the certificate with its key."""

    authority: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes


def due(held: Pair | None, names: Sequence[str], now: datetime) -> str | None:
    """Why a new certificate is due, as a sentence; None while the held one is good."""
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
    """When the certificate is to be renewed: two thirds of its life are over."""
    leaf = x509.load_pem_x509_certificate(held.certificate)
    return leaf.not_valid_after_utc - (leaf.not_valid_after_utc - leaf.not_valid_before_utc) / 3


def make(held: Pair | None, names: Sequence[str], now: datetime) -> Pair:
    """Make a certificate; the authority is the held one while it outlives what it signs."""
    authority, authority_key = authority_of(held, now)
    key = ec.generate_private_key(ec.SECP256R1())
    leaf = (
        builder(now, timedelta(days=LEAF_DAYS), key.public_key())
        .subject_name(subject(names[0][:64]))
        .issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in names]), False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
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
    """The held authority with its key while it is of use, else a new one."""
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
            pass  # what cannot be read signs nothing: another takes its place
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
    """What all certificates have in common."""
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + life)
        .public_key(key)
    )


def subject(text: str) -> x509.Name:
    """A name of one part, 64 characters at most."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A key as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
