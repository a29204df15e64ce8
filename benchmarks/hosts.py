# SPDX-License-Identifier: Apache-2.0
"""``hosts``: a member joins or leaves, and 32 sidecars have renamed their host lists.

Counted from before the write that makes the change is sent until the last list is in place. The
changes are made by a real registrar; the baseline is that write alone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from random import Random
from time import monotonic
from typing import Any

from benchmarks.etcd_server import etcd_server
from benchmarks.figures import Bar, Figure, percentile
from benchmarks.sidecar_parts import LEASE_TTL_S, identity
from benchmarks.worker import Worker, worker
from rdzv.keys import JobKeys
from rdzv.membership import Membership
from rdzv.registrar import Registrar
from rdzv.store import TxnResult
from rdzv.store.etcd import EtcdStore
from rdzv.watching import Mirror, Watching

SIDECARS = 32
PROCESSES = 2
CHANGES = 300
PAUSE_S = 0.05
"""Between two changes, so that each is one of its own."""

JOB = "hosts"


class TimedStore(EtcdStore):
    """Remembers when its last successful transaction was sent and answered."""

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
        workers = [
            await stack.enter_async_context(worker("benchmarks.sidecar_parts"))
            for _ in range(PROCESSES)
        ]
        for number, one in enumerate(workers):
            await one.ask(
                "start",
                endpoint=endpoint,
                job=JOB,
                members=[f"node-{n}" for n in range(number, SIDECARS, PROCESSES)],
                min_nodes=1,
                max_nodes=2 * SIDECARS,
                run_dirs=root,
            )
        latencies, writes = await _change(workers, endpoint, changes)
    print(
        f"{changes} changes: median {percentile(latencies, 0.5) * 1e3:.1f} ms, "
        f"worst {max(latencies) * 1e3:.1f} ms",
        file=sys.stderr,
    )
    return [
        Figure(
            f"hosts/{SIDECARS} lists renamed, p99",
            percentile(latencies, 0.99) * 1e3,
            "ms",
            Bar("value", "<=", 250),
            tuple(latency * 1e3 for latency in latencies),
            percentile(writes, 0.99) * 1e3,
            "one transaction",
            tuple(write * 1e3 for write in writes),
        )
    ]


async def _change(
    workers: list[Worker], endpoint: str, changes: int
) -> tuple[list[float], list[float]]:
    keys = JobKeys("bench", JOB)
    store = TimedStore([endpoint])
    mirror = Mirror(keys.prefix, monotonic)
    membership = Membership(keys, mirror)
    latencies: list[float] = []
    writes: list[float] = []
    watching = asyncio.create_task(Watching(store, mirror).run())
    try:
        for number in range(0, changes, 2):
            member = f"extra-{number}"
            registrar = Registrar(
                store,
                mirror,
                membership,
                identity(member, 1, 2 * SIDECARS),
                lease_ttl_s=LEASE_TTL_S,
                clock=time.monotonic,
                random=Random(number),
            )
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
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await store.close()
    return latencies, writes
