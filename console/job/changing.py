# SPDX-License-Identifier: Apache-2.0
"""Checks before a job is changed by hand: its record exists, and all sidecars understand it."""

from __future__ import annotations

from agent.config.job import JobConfig
from console.help import near
from console.job.reading import missing_job
from rdzv.errors import ConfigError, JobNotFound, MembershipError
from rdzv.job import JobClient
from rdzv.records.job import Job
from rdzv.snapshot import Snapshot


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
