# SPDX-License-Identifier: Apache-2.0
"""``muster forget``: lets a job train from scratch although it has saved before."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from time import time

import click

from agent.config.job import JobConfig
from console.help import Command
from console.job.drain import requester, write
from console.job.reading import connected
from console.options import configured_by, job_named
from rdzv.keys import JobKeys
from rdzv.records.history import HistoryEntry, entry_operations
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, GuardedWrites, Operation, Put


@click.command(
    cls=Command,
    epilog="Example: muster forget digits",
)
@job_named
@configured_by(JobConfig)
def forget(config: JobConfig) -> int:
    """Forget the last step that all ranks have saved, to train from scratch.

    The next start then does not insist on that step. Checkpoints stay: delete them yourself, or the
    script loads them. A world that trains is not disturbed, and its next save counts.
    """
    click.echo(asyncio.run(_forget(config)))
    return 0


async def _forget(config: JobConfig) -> str:
    """Forget the last commit; return a sentence about the result."""
    keys = JobKeys(config.namespace, config.job)
    async with connected(config) as client:
        before = client.membership.snapshot()
        if before.commit_to_start_from is None and keys.last_commit not in before.corrupt:
            return f"job {config.job} has no last commit: there is nothing to forget"

        def plan(snapshot: Snapshot) -> GuardedWrites | None:
            present = [kv.key for kv in client.mirror.under(keys.history)]
            return forgetting(keys, snapshot, requester(socket.gethostname()), time(), present)

        await write(client, plan)
    last = before.last_commit
    subject = "a last commit that could not be read" if last is None else f"step {last.step}"
    return (
        f"forgotten: {subject}; the next start of job {config.job} goes on from whatever its"
        " checkpoint directory has, or trains from scratch"
    )


def forgetting(
    keys: JobKeys, snapshot: Snapshot, author: str, at_unix_s: float, present: list[str]
) -> GuardedWrites | None:
    """Return the transaction that forgets the last commit; None if there is nothing to forget.

    A readable record stays, marked, because later commits need epochs above its own. ``present``:
    the history keys that are known to exist.
    """
    last = snapshot.commit_to_start_from
    if last is not None:
        operation: Operation = Put(keys.last_commit, replace(last, forgotten=True).to_json())
        compares = [Compare(keys.last_commit, "mod", "=", last.mod_revision)]
        why = f"the last commit, step {last.step}, is forgotten"
    elif keys.last_commit in snapshot.corrupt:
        operation = Delete(keys.last_commit)
        compares = [Compare(keys.last_commit, "mod", "<", snapshot.revision + 1)]
        why = "the last commit, which could not be read, is forgotten"
    else:
        return None
    entry = HistoryEntry("forget", author, why, at_unix_s)
    return compares, [operation, *entry_operations(keys, entry, snapshot.revision, present)]
