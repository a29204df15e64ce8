# SPDX-License-Identifier: Apache-2.0
"""``drain``: a pod gets a notice, and no step is lost.

First the time until the host lists of 32 sidecars change. Then a real torchrun job of three nodes,
each under ``muster-run``: rank 0's container gets a SIGTERM, all ranks save the same step, the pod
leaves, the others go on training, and another node joins. The baselines, in turns: the restart of a
bare torchrun, and the same SIGTERM under torch's own c10d.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic

from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_runs, percentile, say
from benchmarks.hosts import PAUSE_S, SIDECARS, lists_changed, start_sidecars
from benchmarks.node_processes import Node, first_of
from benchmarks.sidecar_parts import Sidecar as Parts
from benchmarks.sidecar_parts import TimedRunDir, identity
from benchmarks.training import SAVE_S, STEP_S
from benchmarks.worker import Worker
from benchmarks.worlds import bare_restart, start_native, torchruns, until_world
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.membership import Membership
from rdzv.store import Put
from rdzv.store.etcd.client import EtcdStore

NOTICES = 300
TURNS = 3
DRAINS = 3
"""Drains per job; between two of them another node joins."""

NODES = 3
SIZE = (2, 4)


@dataclass(frozen=True, slots=True)
class Drained:
    """The times of one drain, in seconds.

    They are from the notice to the recorded ``last_commit``, from the release to the survivors'
    next step, and from the notice to that step.
    """

    committed_s: float
    next_step_s: float
    total_s: float


async def measure(notices: int = NOTICES, turns: int = TURNS) -> list[Figure]:
    """Measure the lists first, then jobs in turns with their baselines."""
    delisted, writes = await _delist(notices)
    say(f"{notices} notices: median {percentile(delisted, 0.5) * 1e3:.1f} ms to the last list")
    drains: list[Drained] = []
    bare: list[float] = []
    native: list[float] = []
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(etcd_server())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        for turn in range(turns):
            bare.append(await bare_restart(root / f"bare-{turn}"))
            drains += await row_of_drains(root / f"job-{turn}", endpoint)
            native.append(await native_sigterm(root / f"native-{turn}"))
            say(
                f"bare restart {bare[-1]:.2f} s; drained, to the next step:"
                f" {', '.join(f'{one.next_step_s:.2f}' for one in drains[-DRAINS:])} s;"
                f" native SIGTERM: {native[-1]:.2f} s"
            )
    beyond = [one.next_step_s - median(bare) for one in drains]
    return [
        lists_changed(f"drain/notice to delisted on {SIDECARS} sidecars, p99", delisted, writes),
        of_runs(
            "drain/notice to all committed, beyond one step and the save",
            "s",
            Bar("value", "<=", 0.5),
            [one.committed_s - STEP_S - SAVE_S for one in drains],
        ),
        of_runs(
            "drain/release to the survivors' next step, beyond a bare restart",
            "s",
            Bar("value", "<=", 2.0),
            beyond,
            bare,
            "bare restart",
        ),
        of_runs(
            "drain/SIGTERM to the survivors' next step",
            "s",
            None,
            [one.total_s for one in drains],
            native,
            "native c10d",
        ),
    ]


# -- the lists


async def _delist(notices: int) -> tuple[list[float], list[float]]:
    """Measure each notice until the last of the other sidecars has delisted the member.

    Returns those times, and of one transaction after each notice, in seconds.
    """
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(etcd_server())
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-"))
        workers = await start_sidecars(stack, endpoint, "drain", root)
        latencies, writes = [], []
        for number in range(notices):
            latency_s, write_s = await _give_notice(workers, endpoint, Path(root), number)
            latencies.append(latency_s)
            writes.append(write_s)
        return latencies, writes


async def _give_notice(
    workers: Sequence[Worker], endpoint: str, root: Path, number: int
) -> tuple[float, float]:
    """Let one more member join, get a notice and leave; measure the notice and a transaction."""
    member = f"extra-{number}"
    store = EtcdStore([endpoint])
    run_dir = TimedRunDir(root / member, lambda: None)
    parts = Parts(store, JobKeys("bench", "drain"), identity(member, 1, 2 * SIDECARS), run_dir)
    running = asyncio.create_task(parts.run())
    try:
        await parts.ready()
        await _on_lists(workers, member, present=True)
        sent_s = monotonic()
        _, writer = await asyncio.open_unix_connection(run_dir.path / "notice.sock")
        notice = {"notice": "prestop", "reason": "a benchmark", "seconds_left": 30}
        writer.write(json.dumps(notice).encode() + b"\n")
        last_s = await _on_lists(workers, member, present=False)
        writer.close()
        written_s = monotonic()
        await store.txn([], [Put("/bench/probe", member.encode())])
        write_s = monotonic() - written_s
        await parts.registrar.leave(5.0)
        await asyncio.sleep(PAUSE_S)
        return last_s - sent_s, write_s
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


async def _on_lists(workers: Sequence[Worker], member: str, *, present: bool) -> float:
    renamed_s = await asyncio.gather(
        *(one.ask("delivered", timeout_s=20, member=member, present=present) for one in workers)
    )
    return max(float(at_s) for share in renamed_s for at_s in share)


# -- a job


class Record:
    """The store's records of the current drain; its waits return the time of the change."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def committed(self, after_epoch: int) -> float:
        """Wait until there is a last commit of an epoch above ``after_epoch``."""
        while True:
            snapshot = self._membership.snapshot()
            if snapshot.last_commit is not None and snapshot.last_commit.epoch > after_epoch:
                return monotonic()
            await self._membership.changed_from(snapshot)

    async def released(self, pod_of: str) -> float:
        """Wait until the drain of the member ``pod_of`` has its outcome, ``committed``."""
        while True:
            snapshot = self._membership.snapshot()
            for drain in snapshot.drains.values():
                if drain.member == pod_of and drain.outcome:
                    if drain.outcome != "committed":
                        raise RuntimeError(f"a drain ended {drain.outcome}")
                    return monotonic()
            await self._membership.changed_from(snapshot)

    @property
    def epoch(self) -> int:
        """The epoch of the newest attempt to commit; 0 before the first."""
        commit = self._membership.snapshot().commit
        return commit.epoch if commit else 0


async def row_of_drains(directory: Path, endpoint: str) -> list[Drained]:
    """Drain rank 0 of one job repeatedly; between two drains another node joins."""
    await asyncio.to_thread(directory.mkdir)
    keys = JobKeys("bench", directory.name)
    nodes = [Node(directory, f"node-{n}", endpoint, SIZE) for n in range(NODES)]
    drained = []
    async with recording(keys, endpoint) as record:
        try:
            await asyncio.gather(*(node.start() for node in nodes))
            for turn in range(DRAINS):
                await until_world([node.torchrun for node in nodes], size=len(nodes))
                first = first_of(nodes)
                staying = [node for node in nodes if node is not first]
                drained.append(await _drain(record, first, staying))
                nodes.remove(first)
                await first.kill()
                if turn + 1 < DRAINS:
                    name = f"node-{NODES + turn}"
                    nodes.append(Node(directory, name, endpoint, SIZE))
                    await nodes[-1].start()
        finally:
            await asyncio.gather(*(node.kill() for node in nodes))
    return drained


async def _drain(record: Record, leaver: Node, staying: Sequence[Node]) -> Drained:
    survivors = [node.torchrun for node in staying]
    before = set().union(*(torchrun.steps.pids for torchrun in survivors))
    epoch = record.epoch
    assert leaver.torchrun.process is not None
    noticed_s = monotonic()
    leaver.torchrun.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        committed_s = await record.committed(epoch)
        released_s = await record.released(leaver.name)
    stepped_s = await until_world(survivors, size=len(survivors), without=before)
    status = await leaver.torchrun.process.wait()
    if status != 128 + signal.SIGTERM:
        raise RuntimeError(f"a drained container ended with {status}")
    return Drained(committed_s - noticed_s, stepped_s - released_s, stepped_s - noticed_s)


@asynccontextmanager
async def recording(keys: JobKeys, endpoint: str) -> AsyncIterator[Record]:
    """Follow a job's drains in the store."""
    store = EtcdStore([endpoint])
    try:
        async with JobClient.of(store, keys, clock=monotonic).following() as client:
            yield Record(client.membership)
    finally:
        await store.close()


async def native_sigterm(directory: Path) -> float:
    """Measure the time from SIGTERM to an agent without the store to the others' next step."""
    async with torchruns() as running:
        await start_native(directory, running, NODES, SIZE)
        await until_world(running, size=NODES)
        before = set().union(*(torchrun.steps.pids for torchrun in running))
        leaver = running[-1]
        assert leaver.process is not None
        noticed_s = time.monotonic()
        leaver.process.send_signal(signal.SIGTERM)
        stepped_s = await until_world(running[:-1], size=NODES - 1, without=before)
        return stepped_s - noticed_s
