# SPDX-License-Identifier: Apache-2.0
"""``muster admit``: ends a member's quarantine by hand."""

from __future__ import annotations

import asyncio
import socket
from time import time

import click

from agent.config.job import JobConfig
from console.completion import pod_names
from console.help import Command
from console.job.changing import no_member
from console.job.drain import requester, write
from console.job.reading import connected
from console.options import configured_by
from rdzv.errors import MembershipError
from rdzv.keys import JobKeys
from rdzv.records.history import HistoryEntry, entry_operations
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, GuardedWrites


@click.command(
    cls=Command,
    epilog="\b\nExample:\n  muster admit trainer-3 --job digits",
)
@configured_by(JobConfig)
@click.argument("member", shell_complete=pod_names)
def admit(config: JobConfig, member: str) -> int:
    """End the quarantine of MEMBER: it may join the next world, and its failures are forgotten.

    muster status names the quarantined pods, and when the quarantine ends by itself.
    """
    asyncio.run(_admit(config, member))
    click.echo(f"{member} may take part again")
    return 0


async def _admit(config: JobConfig, member: str) -> None:
    keys = JobKeys(config.namespace, config.job)
    async with connected(config) as client:
        _check(config, client.membership.snapshot(), member)

        def plan(snapshot: Snapshot) -> GuardedWrites | None:
            record = snapshot.quarantines.get(member)
            if snapshot.job is None or record is None or not record.out:
                return None
            key = keys.in_generation(snapshot.job.generation).quarantine(member)
            entry = HistoryEntry(
                "admit",
                member,
                f"let in by hand by {requester(socket.gethostname())}",
                time(),
                details={"deaths": record.deaths, "pod_uid": record.pod_uid},
            )
            present = [kv.key for kv in client.mirror.under(keys.history)]
            history = entry_operations(keys, entry, snapshot.revision, present)
            return [Compare(key, "mod", "=", record.mod_revision)], [Delete(key), *history]

        await write(client, plan)


def _check(config: JobConfig, snapshot: Snapshot, name: str) -> None:
    member = snapshot.members.get(name)
    if member is None:
        raise no_member(config.job, name, snapshot)
    if snapshot.quarantine_of(member) is None:
        raise MembershipError(f"{name} is not quarantined: nothing to admit, see muster status")
