# SPDX-License-Identifier: Apache-2.0
"""The address of the store, and the credentials for it: pure, but for the reading of files.

This has the paths of secrets and never a secret, so it may be shown. Sentences name the flag and
the variable that each value comes from, because both a sidecar and a command read it there.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Literal

from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError
from rdzv.sentences import named

Driver = Literal["http2", "etcd3", "etcd"]
"""``etcd`` is what ``http2`` was called before."""

READS = 5
"""Attempts to read files that keep changing while they are read."""

PASSWORD_BYTES = 72
"""Longest password, in bytes: bcrypt, with which etcd keeps passwords, ignores the rest."""

_ADDRESS = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<target>(?:\[[0-9a-fA-F:.%]+\]|[^\s:/@\[\]]+):\d{1,5})/?"
)
_ENDPOINTS = named("--etcd-endpoints")
_CACERT = named("--etcd-cacert")
_CERT = named("--etcd-cert")
_KEY = named("--etcd-key")
_USER = named("--etcd-user")
_PASSWORD_FILE = named("--etcd-password-file")


@dataclass(frozen=True, slots=True)
class Access:
    """The access to one etcd cluster; raises ``ConfigError`` with all faults, one a line.

    ``endpoints`` are ``host:port`` or ``http://host:port`` for plain text, ``https://host:port``
    for TLS. ``cacert``, ``cert``, ``key`` and ``password_file`` are paths; all are read again when
    they change. A client certificate and a user do not exclude each other; etcd then goes by the
    user. The driver ``etcd3`` needs the package of that name.
    """

    endpoints: tuple[str, ...]
    cacert: str = ""
    cert: str = ""
    key: str = field(default="", repr=False)
    user: str = field(default="", repr=False)
    password_file: str = field(default="", repr=False)
    driver: Driver = "http2"

    def __post_init__(self) -> None:
        faults = [*self._endpoint_faults(), *self._certificate_faults(), *self._user_faults()]
        if faults:
            raise ConfigError("\n".join(faults))

    @property
    def tls(self) -> bool:
        """Whether the endpoints are reached over TLS."""
        return self.endpoints[0].startswith("https://")

    @property
    def targets(self) -> tuple[str, ...]:
        """The endpoints as ``host:port``."""
        return tuple(target_of(endpoint) for endpoint in self.endpoints)

    def file_faults(self) -> Iterator[str]:
        """Read every file once; yield one sentence for each that cannot be used. Blocks."""
        if self.tls:
            try:
                read_certificates(self)
            except ConfigError as error:
                yield str(error)
        if self.user:
            try:
                read_password(self)
            except ConfigError as error:
                yield str(error)

    def _endpoint_faults(self) -> Iterator[str]:
        if not self.endpoints:
            yield f"there is no etcd endpoint: give at least one host:port in {_ENDPOINTS}"
        for endpoint in self.endpoints:
            try:
                target_of(endpoint)
            except ConfigError as error:
                yield str(error)
        if len({endpoint.startswith("https://") for endpoint in self.endpoints}) > 1:
            yield (
                "some endpoints are https:// and some are not, and a password or a job's records"
                f" sent to one of the latter could be read: write all alike in {_ENDPOINTS}"
            )

    def _certificate_faults(self) -> Iterator[str]:
        tls = any(endpoint.startswith("https://") for endpoint in self.endpoints)
        if tls and not self.cacert:
            yield (
                f"the endpoints are https://, and {_CACERT} is missing: name the file with the"
                " certificate authority that signed the store's certificates (for a public one,"
                " the system's bundle)"
            )
        given = [
            name
            for name, value in ((_CACERT, self.cacert), (_CERT, self.cert), (_KEY, self.key))
            if value
        ]
        if given and self.endpoints and not tls:
            yield (
                f"{given[0]} is given, but the endpoints are not https://, so nothing would be"
                f" encrypted: write https://host:port in {_ENDPOINTS}"
            )
        if bool(self.cert) != bool(self.key):
            there, missing = (_CERT, _KEY) if self.cert else (_KEY, _CERT)
            yield f"{there} is given without {missing}: a client certificate needs both files"

    def _user_faults(self) -> Iterator[str]:
        if ":" in self.user:
            yield (
                f"{_USER} has a colon in it: give the name alone, and the password in"
                f" {_PASSWORD_FILE}"
            )
        if self.user and not self.password_file:
            yield (
                f"{_USER} is given without {_PASSWORD_FILE}: name the file that holds the password"
                " (a user known by the name in a client certificate needs neither)"
            )
        if self.password_file and not self.user:
            yield f"{_PASSWORD_FILE} is given without {_USER}: say whose password it is"


def target_of(address: str, setting: str = _ENDPOINTS) -> str:
    """Parse ``host:port`` from an endpoint; raise ``ConfigError`` naming ``setting``."""
    if "@" in address:
        # The text before it may be a password: it must not be repeated.
        raise ConfigError(
            f"an endpoint in {setting} holds a user name or a password: give host:port alone, and"
            f" {_USER} with {_PASSWORD_FILE}"
        )
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ConfigError(
            f"{address!r} is not of the form host:port, http://host:port or https://host:port:"
            f" correct it in {setting}"
        )
    return match["target"]


@dataclass(frozen=True, slots=True)
class Certificates:
    """The content of the files, as PEM; ``cert``, ``key``: None without a client certificate."""

    cacert: bytes = field(repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    """Made of the same files, for HTTP/2."""


def read_certificates(access: Access) -> Certificates:
    """Read and check the files of ``access``; raise ``ConfigError`` if they are unusable. Blocks.

    A rotation replaces several, one after the other, and the check reads them once more: so its
    result counts only if nothing has changed before they are read again after it.
    """
    for _ in range(READS):
        read, context, fault = _read_certificates(access), None, None
        try:
            context = _context_of(access)
        except ConfigError as error:
            fault = error
        if _read_certificates(access) == read:
            if fault is not None:
                raise fault
            return replace(read, context=context)
    raise ConfigError(
        f"the files of {_CACERT}, {_CERT} and {_KEY} keep changing while they are read: wait until"
        " they have been replaced"
    )


def read_password(access: Access) -> str:
    """Read the password of ``access``; raise ``ConfigError`` if it is unusable. Blocks."""
    return password_in(access.password_file, _PASSWORD_FILE)


def password_in(path: str, setting: str) -> str:
    """Read a password, without the end of its line; raise ``ConfigError`` naming ``setting``."""
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:
        # The path is not shown: it may be a password that was given in place of its file.
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"the file that {setting} names cannot be read ({why}): correct the path, or let this"
            " process read it"
        ) from None
    password = text.removesuffix("\n").removesuffix("\r")
    if not password:
        raise ConfigError(f"the file that {setting} names is empty: write the password")
    if len(password.encode()) > PASSWORD_BYTES:
        raise ConfigError(
            f"the password in the file that {setting} names is longer than {PASSWORD_BYTES} bytes,"
            " which is all that etcd takes: choose a shorter one"
        )
    return password


def _read_certificates(access: Access) -> Certificates:
    cacert = _bytes_of(access.cacert, _CACERT)
    if not access.cert:
        return Certificates(cacert)
    return Certificates(cacert, _bytes_of(access.cert, _CERT), _bytes_of(access.key, _KEY))


def _bytes_of(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} of {setting} cannot be read ({error.strerror}): correct the path, or let this"
            " process read it"
        ) from None


def _context_of(access: Access) -> ssl.SSLContext:
    """Return a context for TLS, and so check the files; raise ``ConfigError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(cafile=access.cacert)
    except (OSError, ssl.SSLError):
        raise ConfigError(
            f"{access.cacert} of {_CACERT} holds no certificate in PEM form: name the file of the"
            " certificate authority"
        ) from None
    if not access.cert:
        return context
    try:
        # With no pass phrase at all, OpenSSL would ask for one at the terminal.
        context.load_cert_chain(access.cert, access.key, password="")
    except (OSError, ssl.SSLError) as error:
        flaw = (
            "do not belong together"
            if "MISMATCH" in str(error).upper()
            else "are no certificate and unencrypted key in PEM form"
        )
        raise ConfigError(
            f"{access.cert} of {_CERT} and {access.key} of {_KEY} {flaw}: give the two files of"
            " one client certificate"
        ) from None
    return context
