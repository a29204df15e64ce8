# SPDX-License-Identifier: Apache-2.0
"""A change of a job by hand: checks before it, its author, and the write, repeated if needed."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

from agent.job_config import JobConfig
from console.help import near
from console.job.reading import connected, missing_job
from rdzv.errors import (
    ConfigError,
    JobNotFound,
    MembershipError,
    StoreAmbiguous,
    StoreFull,
    StoreUnavailable,
)
from rdzv.job import JobClient
from rdzv.records.job import Job
from rdzv.snapshot import Snapshot
from rdzv.store import Delete, GuardedWrites, Operation, Put, Range, Store

WRITE_TIMEOUT_S = 10.0

ASKED_BY = "MUSTER_ASKED_BY"
"""The variable with the author of a request that a sidecar carries out."""


def present_job(config: JobConfig, client: JobClient, snapshot: Snapshot) -> Job:
    """Return the job's record; raises ``JobNotFound``, or ``ConfigError`` if it is unreadable."""
    if snapshot.job is not None:
        return snapshot.job
    if not client.mirror.kvs:
        raise JobNotFound(missing_job(client.keys))
    raise ConfigError(
        f"the record of job {config.job} is not there, or cannot be read: see muster status"
    )


def check_versions(job: str, snapshot: Snapshot) -> None:
    """Raise ``MembershipError`` if a sidecar of 0.1.0, which reports no version, takes part."""
    old = sorted(name for name, member in snapshot.members.items() if not member.version)
    if old:
        raise MembershipError(
            f"job {job} stays as it is: the sidecar of {old[0]} is of 0.1.0, and would not know"
            " what to do: upgrade all first, see docs/upgrading.md#upgrade-a-job"
        )


def no_member(job: str, name: str, snapshot: Snapshot) -> ConfigError:
    """Return the error for a member that the job does not have."""
    names = sorted(snapshot.members)
    hint = f"did you mean {close}? " if (close := near(name, names)) else ""
    have = f"{hint}its members are {', '.join(names)}" if names else "it has no members"
    return ConfigError(f"job {job} has no member {name}: {have}")


def requester(host: str = "") -> str:
    """Return the author of a request, ``user@host``; the user's number if it has no name.

    ``host``: this machine unless given.
    """
    if asked_by := os.environ.get(ASKED_BY):
        return asked_by
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # As in the sidecar's container; OSError since Python 3.13.
        user = str(os.getuid())
    return f"{user}@{host or socket.gethostname()}"


async def change(
    config: JobConfig,
    check: Callable[[Snapshot], None],
    plan: Callable[[JobClient, Snapshot], GuardedWrites | None],
) -> Snapshot:
    """Connect to the job, ``check`` it, and ``write`` what ``plan`` makes of it.

    Returns the snapshot from before.
    """
    async with connected(config) as client:
        before = client.membership.snapshot()
        check(before)
        await write(client, partial(plan, client))
    return before


async def write(client: JobClient, plan: Callable[[Snapshot], GuardedWrites | None]) -> bool:
    """Write what ``plan`` makes of the newest snapshot; plan again after a conflicting write.

    ``plan`` returns None once nothing is left to write. Returns whether there was anything. Raises
    ``StoreError`` after ``WRITE_TIMEOUT_S``, ``StoreRefused`` at once.
    """
    tried = False
    store, mirror, membership = client.store, client.mirror, client.membership
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            while (planned := plan(membership.snapshot())) is not None:
                tried = True
                try:
                    result = await store.txn(*planned)
                    revision, written = result.revision, result.succeeded
                except StoreAmbiguous:
                    # After a read, ``plan`` sees whether the write was applied, or plans it again;
                    # should the first one still land, the compares let only one of the two pass.
                    read = await store.range(client.keys.job, timeout_s=WRITE_TIMEOUT_S)
                    revision, written = read.revision, False
                except StoreFull:
                    applied = await _applied(store, planned[1])
                    if applied is None:
                        raise
                    revision, written = applied, True
                await mirror.reached(revision)
                if written:
                    break
    except TimeoutError:
        raise StoreUnavailable(
            f"the store did not confirm the write within {WRITE_TIMEOUT_S:g} s: see muster status"
            " whether it was written, then retry"
        ) from None
    return tried


async def _applied(store: Store, operations: Sequence[Operation]) -> int | None:
    """Return the revision at which the store shows ``operations`` as applied; None if it does not.

    Only puts and deletes are checked.
    """
    touched = [one for one in operations if isinstance(one, (Put, Delete))]
    read = await store.txn([], [Range(one.key) for one in touched])
    for one, response in zip(touched, read.responses, strict=True):
        wanted = [one.value] if isinstance(one, Put) else []
        if not isinstance(response, tuple) or [kv.value for kv in response] != wanted:
            return None
    return read.revision
