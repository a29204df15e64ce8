# SPDX-License-Identifier: Apache-2.0
"""``hosts``: a member joins or leaves, until 32 sidecars have renamed their host lists.

The time is from just before the write that makes the change to the rename of the last list. A real
registrar makes the changes; the baseline is that write alone. Also ``discover_hosts.sh``, which
prints such a list, beside ``cat``.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from agent.parts import member_parts
from agent.surroundings import MemberSettings
from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_runs, p99, percentile, say
from benchmarks.sidecar_parts import LEASE_TTL_S, identity, surroundings
from benchmarks.worker import Worker, worker
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.store import TxnResult
from rdzv.store.etcd.client import EtcdStore

SIDECARS = 32
PROCESSES = 2
CHANGES = 300
PAUSE_S = 0.05
"""Time between two changes, so that their effects do not overlap."""

JOB = "hosts"

CALLS = 500
LISTED = 64
SCRIPT = Path(__file__).parent.parent / "launcher_shim" / "pod" / "discover_hosts.sh"


class TimedStore(EtcdStore):
    """A store that records when its last successful transaction was sent and answered."""

    sent_s = answered_s = 0.0

    async def txn(self, *args: Any, **options: Any) -> TxnResult:
        sent_s = monotonic()
        result = await super().txn(*args, **options)
        if result.succeeded:
            self.sent_s, self.answered_s = sent_s, monotonic()
        return result


async def measure(changes: int = CHANGES) -> list[Figure]:
    """Make the changes one after another."""
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(etcd_server())
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-"))
        workers = await start_sidecars(stack, endpoint, JOB, root)
        latencies, writes = await _change(workers, endpoint, changes)
        scripts, cats = await asyncio.to_thread(_print, Path(root))
    say(
        f"{changes} changes: median {percentile(latencies, 0.5) * 1e3:.1f} ms, "
        f"worst {max(latencies) * 1e3:.1f} ms"
    )
    return [
        lists_changed(f"hosts/{SIDECARS} lists renamed, p99", latencies, writes),
        of_runs(
            f"hosts/discover_hosts.sh, {LISTED} hosts",
            "ms",
            Bar("ratio", "<=", 3),
            scripts,
            cats,
            "cat",
        ),
    ]


def lists_changed(name: str, latencies: Sequence[float], writes: Sequence[float]) -> Figure:
    """Build the figure of changes, in seconds, on all lists; beside a transaction after each."""
    took_ms, write_ms = ([one * 1e3 for one in runs] for runs in (latencies, writes))
    return of_runs(
        name, "ms", Bar("value", "<=", 250), took_ms, write_ms, "one transaction", by=p99
    )


async def start_sidecars(stack: AsyncExitStack, endpoint: str, job: str, root: str) -> list[Worker]:
    """Start ``SIDECARS`` sidecars with run directories under ``root``, in ``PROCESSES`` helpers."""
    workers = [
        await stack.enter_async_context(worker("benchmarks.sidecar_parts"))
        for _ in range(PROCESSES)
    ]
    for number, one in enumerate(workers):
        await one.ask(
            "start",
            endpoint=endpoint,
            job=job,
            members=[f"node-{n}" for n in range(number, SIDECARS, PROCESSES)],
            min_nodes=1,
            max_nodes=2 * SIDECARS,
            run_dirs=root,
        )
    return workers


async def _change(
    workers: list[Worker], endpoint: str, changes: int
) -> tuple[list[float], list[float]]:
    keys = JobKeys("bench", JOB)
    latencies: list[float] = []
    writes: list[float] = []
    async with AsyncExitStack() as stack:
        store = TimedStore([endpoint])
        stack.push_async_callback(store.close)
        client = JobClient.of(store, keys, clock=monotonic)
        await stack.enter_async_context(client.following())
        for number in range(0, changes, 2):
            member = f"extra-{number}"
            settings = MemberSettings(
                keys=keys, identity=identity(member, 1, 2 * SIDECARS), lease_ttl_s=LEASE_TTL_S
            )
            around = surroundings(store, Random(number))
            registrar = member_parts(around, settings, client).registrar
            registering = asyncio.create_task(registrar.run())
            await registrar.registered.wait()
            for present in (True, False):
                if not present:
                    registering.cancel()
                    await asyncio.wait([registering])
                    await registrar.leave(5.0)
                renamed_s = await asyncio.gather(
                    *(
                        one.ask("delivered", timeout_s=20, member=member, present=present)
                        for one in workers
                    )
                )
                last_s = max(at_s for share in renamed_s for at_s in share)
                latencies.append(last_s - store.sent_s)
                writes.append(store.answered_s - store.sent_s)
                await asyncio.sleep(PAUSE_S)
    return latencies, writes


def _print(directory: Path) -> tuple[list[float], list[float]]:
    """Run the script and ``cat`` in turns; return the milliseconds of each call."""
    run_dir = directory / "script"
    run_dir.mkdir()
    shutil.copy(SCRIPT, run_dir)
    lines = [f"node-{number}.0a1b2c3d:1\n" for number in range(LISTED)]
    (run_dir / "hosts").write_text("".join([*lines, "rev-1:0\n"]))
    cat = shutil.which("cat") or "cat"
    commands = ([str(run_dir / SCRIPT.name)], [cat, str(run_dir / "hosts")])
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(CALLS):
        for command, runs in zip(commands, took, strict=True):
            runs.append(_call_ms(command))
    return took


def _call_ms(command: list[str]) -> float:
    """Time a command in ms, with its output discarded and as little overhead as possible."""
    began_s = monotonic()
    to_null = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=[to_null])
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise RuntimeError(f"{command[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return (monotonic() - began_s) * 1e3
