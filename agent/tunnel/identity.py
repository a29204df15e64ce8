# SPDX-License-Identifier: Apache-2.0
"""Identities at the ends of the tunnel: this sidecar by its key, and the members by their pins.

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
from launcher_shim.hosts import token_of
from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError, LauncherError
from rdzv.records.job import Member
from rdzv.sentences import named
from rdzv.snapshot import Snapshot

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


class NoPeer(LauncherError):
    """No member that may be connected to: one sentence why."""


def calling_peers(snapshot: Snapshot, generation: int | None, pin: str) -> Member:
    """Return the launcher whose certificate has the pin ``pin``; raise ``NoPeer`` if none has.

    ``generation`` is what this sidecar is registered in; None: it is not.
    """
    _same_generation(snapshot, generation)
    found = [member for member in snapshot.members.values() if member.pin == pin]
    if not found:
        raise NoPeer("its certificate is that of no present member of this job")
    if found[0].role != "launcher":
        raise NoPeer(f"{found[0].name} is no launcher, and only a launcher starts commands")
    return found[0]


def called_peer(snapshot: Snapshot, generation: int | None, host: str) -> Member:
    """Return the member that is ``host`` in the host list; raise ``NoPeer`` without a tunnel."""
    _same_generation(snapshot, generation)
    for member in snapshot.members.values():
        if token_of(member.name, member.pod_uid) != host:
            continue
        if not member.pin or not member.tunnel_port:
            raise NoPeer(
                f"{member.name} has no tunnel: set MUSTER_TUNNEL_PORT for its sidecar, and see that"
                " it is of the version of the launcher's"
            )
        return member
    raise NoPeer(f"host {host} is no present member of the job")


def is_present(snapshot: Snapshot, generation: int | None, peer: Member) -> bool:
    """Return whether the pod of ``peer`` is still a member, and its sidecar still has that key."""
    job, member = snapshot.job, snapshot.members.get(peer.name)
    return (
        job is not None
        and job.generation == generation
        and member is not None
        and (member.pod_uid, member.pin) == (peer.pod_uid, peer.pin)
    )


def _same_generation(snapshot: Snapshot, generation: int | None) -> None:
    if generation is None:
        raise NoPeer("this sidecar is not registered")
    if snapshot.job is None or snapshot.job.generation != generation:
        raise NoPeer(f"this sidecar is of generation {generation}, which is over")
