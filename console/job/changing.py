# SPDX-License-Identifier: Apache-2.0
"""Checks before a job is changed by hand: its record exists, and all sidecars understand it."""

from __future__ import annotations

from agent.config.sidecar import JobConfig
from rdzv.errors import ConfigError, JobNotFound, MembershipError
from rdzv.flags import named
from rdzv.job import JobClient
from rdzv.records.job import Job
from rdzv.snapshot import Snapshot


def check_present(config: JobConfig, client: JobClient) -> None:
    """Raise ``JobNotFound`` if the store has no key of the job."""
    if not client.mirror.kvs:
        raise JobNotFound(
            f"the store has no job {config.job} in namespace {config.namespace}: check"
            f" {named('--job')} and {named('--namespace')}"
        )


def present_job(config: JobConfig, client: JobClient, snapshot: Snapshot) -> Job:
    """Return the job's record; raises ``JobNotFound``, or ``ConfigError`` if it is unreadable."""
    if snapshot.job is not None:
        return snapshot.job
    check_present(config, client)
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
