# SPDX-License-Identifier: Apache-2.0
"""The members that may be at the other end of a tunnel connection, by the membership: pure."""

from __future__ import annotations

from launcher_shim.horovod.hosts import token_of
from rdzv.errors import LauncherError
from rdzv.records.job import Member
from rdzv.snapshot import Snapshot


class NoPeer(LauncherError):
    """No member that may be connected to: one sentence why."""


def calling(snapshot: Snapshot, generation: int | None, pin: str) -> Member:
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


def called(snapshot: Snapshot, generation: int | None, host: str) -> Member:
    """Return the member that Horovod knows as ``host``; raise ``NoPeer`` if none has a tunnel."""
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
