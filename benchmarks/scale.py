# SPDX-License-Identifier: Apache-2.0
"""``scale``: 1,000 sidecars' registrars and watchers on one etcd.

They join in waves and rest, a third leaves at once and comes back in waves. The figures of each
phase: the time until every member lists all others, the cost for etcd and one sidecar, and the
number of messages and lists, beside the number of events, which is a lower bound: each of N changes
has to reach each of N watchers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic

from benchmarks.etcd_members import etcd_members
from benchmarks.figures import Bar, Figure, of_one, say
from benchmarks.processor_time import cpu_s
from benchmarks.resident_memory import rss_mib
from benchmarks.worker import Worker, worker

SIDECARS = 1000
PROCESSES = 4
REST_S = 20.0
PHASE_S = 900.0

WAVE = 100
"""Number of sidecars that join at once. In a cluster each has some processor to itself; if hundreds
share two cores, answers stay unread beyond their calls' timeouts, and the calls are retried."""

LEASE_TTL_S = 60.0
"""Lease of the sidecars. Hundreds in one process delay each other: with the default of 10 s the
benchmark's processes would lose leases for lack of processor time."""

JOB = "scale"

Counts = Counter[str]


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: seconds until all had seen it, CPU seconds, sidecars at its end, and counts."""

    name: str
    took_s: float
    etcd_cpu_s: float
    sidecars_cpu_s: float
    sidecars: int
    etcd_rss_mib: float
    sidecars_rss_mib: float
    counts: Counts

    def line(self) -> str:
        count = self.counts
        return (
            f"{self.name}: {self.took_s:.1f} s; CPU of etcd {self.etcd_cpu_s:.1f} s, of one sidecar"
            f" {self.sidecars_cpu_s / self.sidecars * 1e3:.0f} ms; memory of etcd"
            f" {self.etcd_rss_mib:.0f} MiB, of all sidecars {self.sidecars_rss_mib:.0f} MiB;"
            f" {count['writes']} writes, {count['writes that lost']} that lost,"
            f" {count['writes in doubt']} in doubt,"
            f" {count['reads']} reads of {count['records read']} records,"
            f" {count['renewals']} renewals, {count['events']} events in {count['batches']}"
            f" messages, {count['lists made']} lists made"
        )


async def measure(sidecars: int = SIDECARS) -> list[Figure]:
    """Run the phases."""
    phases: dict[str, Phase] = {}
    async for phase in grow_and_shrink(sidecars, PROCESSES, REST_S, WAVE, LEASE_TTL_S):
        phases[phase.name] = phase
        say(phase.line())
    rest, join = phases["rest"], phases["join"]
    figures = [
        of_one(f"scale/{sidecars} sidecars: {name}", "s", None, phase.took_s)
        for name, phase in phases.items()
        if name != "rest"
    ]
    per_sidecar = join.sidecars_cpu_s / sidecars * 1e3
    resting = rest.sidecars_cpu_s / sidecars / REST_S
    lists = join.counts["lists made"] / join.counts["events"]
    figures += [
        of_one("scale/CPU of one sidecar for the join of all", "ms", None, per_sidecar),
        of_one("scale/CPU of one sidecar at rest", "%", None, resting * 100),
        of_one("scale/CPU of etcd at rest", "%", None, rest.etcd_cpu_s / REST_S * 100),
        of_one("scale/memory of etcd", "MiB", None, rest.etcd_rss_mib),
        of_one(
            "scale/memory of one sidecar's parts", "MiB", None, rest.sidecars_rss_mib / sidecars
        ),
        of_one("scale/lists made for each event delivered", "", Bar("value", "<=", 0.5), lists),
    ]
    return figures


async def grow_and_shrink(
    sidecars: int,
    processes: int,
    rest_s: float,
    wave: int,
    lease_ttl_s: float,
    etcd_arguments: Sequence[str] = (),
) -> AsyncGenerator[Phase, None]:
    """Join, rest, let a third leave and return; raises ``TimeoutError`` if one takes too long.

    ``wave``: the number of sidecars that join at once.
    """
    names = [f"node-{number:04}" for number in range(sidecars)]
    third = names[::3]
    async with AsyncExitStack() as stack:
        members = await stack.enter_async_context(etcd_members(1, etcd_arguments))
        workers = [
            await stack.enter_async_context(worker("benchmarks.scale_parts"))
            for _ in range(processes)
        ]
        crowd = _Crowd(workers, members.endpoints[0], members.pids[0], lease_ttl_s)
        await crowd.begin()
        await crowd.join(names, wave)
        yield await crowd.phase("join", await crowd.until(sidecars))
        await asyncio.sleep(rest_s)
        yield await crowd.phase("rest", monotonic())
        await crowd.leave(third)
        yield await crowd.phase("leave of a third", await crowd.until(sidecars - len(third)))
        await crowd.join(third, wave)
        yield await crowd.phase("return of a third", await crowd.until(sidecars))


def _etcd_use(pid: int) -> dict[str, float]:
    return {"etcd_cpu_s": cpu_s(pid), "etcd_rss_mib": rss_mib(pid)}


class _Crowd:
    """All sidecars, spread over the helper processes by name."""

    def __init__(
        self, workers: Sequence[Worker], endpoint: str, etcd_pid: int, lease_ttl_s: float
    ) -> None:
        self._workers = workers
        self._common = {"endpoint": endpoint, "job": JOB, "lease_ttl_s": lease_ttl_s}
        self._etcd_pid = etcd_pid
        self._home: dict[str, int] = {}
        self._began_s = 0.0
        self._before: Counts = Counter()
        self._base_rss_mib = 0.0

    async def begin(self) -> None:
        self._before = await self._counts()
        self._base_rss_mib = self._before["rss_mib"]
        self._began_s = monotonic()

    async def join(self, names: Sequence[str], wave: int) -> None:
        for number, name in enumerate(names):
            self._home.setdefault(name, number % len(self._workers))
        order = {**self._common, "at_once": max(1, wave // len(self._workers))}
        await asyncio.gather(
            *(one.ask("join", PHASE_S, names=share, **order) for one, share in self._shares(names))
        )

    async def leave(self, names: Sequence[str]) -> None:
        await asyncio.gather(
            *(one.ask("leave", PHASE_S, names=share) for one, share in self._shares(names))
        )

    async def until(self, listed: int) -> float:
        """Wait until every sidecar lists ``listed`` members; return the time of the last one."""
        shares = await asyncio.gather(
            *(one.ask("until", PHASE_S, listed=listed) for one in self._workers)
        )
        return float(max(max(share) for share in shares))

    async def phase(self, name: str, ended_s: float) -> Phase:
        """Build the figures of the phase since the end of the previous one, and start the next."""
        now = await self._counts()
        spent = Counter(now)
        spent.subtract(self._before)
        self._before = now
        phase = Phase(
            name,
            ended_s - self._began_s,
            spent["etcd_cpu_s"],
            spent["cpu_s"],
            int(now["sidecars"]),
            now["etcd_rss_mib"],
            now["rss_mib"] - self._base_rss_mib,
            spent,
        )
        self._began_s = monotonic()
        return phase

    async def _counts(self) -> Counts:
        total: Counts = Counter()
        for report in await asyncio.gather(*(one.ask("counts") for one in self._workers)):
            total.update(report)
        total.update(await asyncio.to_thread(_etcd_use, self._etcd_pid))
        return total

    def _shares(self, names: Sequence[str]) -> list[tuple[Worker, list[str]]]:
        shares: list[list[str]] = [[] for _ in self._workers]
        for name in names:
            shares[self._home[name]].append(name)
        return list(zip(self._workers, shares, strict=True))
