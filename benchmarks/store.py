# SPDX-License-Identifier: Apache-2.0
"""``store``: our etcd client beside the packages etcd3 0.12.0 and aetcd 1.0.0, and after a kill.

Each client is a process of its own; they take turns on one etcd, in an order that changes with each
round. The figure is the upper quartile of the rounds, as other work on the machine only ever slows
a client down. Then the leader of three members is killed under a client that writes, watches and
holds leases: the figure is the client's time beyond etcd's own election.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random
from statistics import median

from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_runs, percentile, say
from benchmarks.store_recovery import Recovery, recoveries
from benchmarks.worker import Worker, worker

OURS, DRIVER = "http2", "etcd3"
RIVALS = ("the etcd3 package", "aetcd")
CLIENTS = (OURS, *RIVALS, DRIVER)

ROUNDS = 60
SHAPES = (
    ("transactions", 1, 64, 1.2),
    ("transactions", 64, 512, 1.1),
    ("reads", 1, 64, 1.4),
    ("reads", 64, 512, 1.1),
)
"""The kind of call, the number in flight, the number per round, and the bar beside the better
package. A round takes a tenth of a second, so that other work on the machine affects all clients
alike."""

RECOVERY_BAR = Bar("value", "<=", 1.5)

KILLS = 5


async def measure(rounds: int = ROUNDS, kills: int = KILLS) -> list[Figure]:
    """Measure the speed first, then the recovery of all drivers in turns."""
    figures = await _speed(rounds)
    found = await recoveries(kills)
    for name, runs in found.items():
        for run in runs:
            say(
                f"{name}: election {run.election_s:.2f} s, no write for {run.write_gap_s:.2f} s,"
                f" no event for {run.watch_gap_s:.2f} s, leases lost: {run.leases_lost}"
            )
    return figures + [
        figure for name, runs in found.items() for figure in _recovery_figures(name, runs)
    ]


async def _speed(rounds: int) -> list[Figure]:
    rates: dict[tuple[str, str, int], list[float]] = {}
    cpu: dict[tuple[str, str, int], list[float]] = {}
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(etcd_server())
        workers: dict[str, Worker] = {}
        for name in CLIENTS:
            workers[name] = await stack.enter_async_context(worker("benchmarks.store_clients"))
            await workers[name].ask("open", name=name, endpoint=endpoint)
        random = Random(0)
        for number in range(rounds + 1):
            for work, lanes, count, _ in SHAPES:
                for name in random.sample(CLIENTS, len(CLIENTS)):
                    took_s, used_s = await workers[name].ask(
                        "run", work=work, lanes=lanes, count=count
                    )
                    if number:  # the first round is a warm-up
                        rates.setdefault((name, work, lanes), []).append(count / took_s)
                        cpu.setdefault((name, work, lanes), []).append(used_s / count * 1e3)
    figures = []
    for work, lanes, _, bar in SHAPES:
        for name in CLIENTS:
            shape = (name, work, lanes)
            say(
                f"{work}, {lanes} at a time, {name}: {_rate(rates[shape]):.0f} a second"
                f" ({min(rates[shape]):.0f} to {max(rates[shape]):.0f}),"
                f" {median(cpu[shape]):.2f} ms of CPU each"
            )
        best = max(RIVALS, key=lambda rival: _rate(rates[rival, work, lanes]))
        at_a_time = "one by one" if lanes == 1 else f"{lanes} at a time"
        for name, its_bar, who in (
            (OURS, Bar("ratio", ">=", bar), ""),
            (DRIVER, None, f", driver {DRIVER}"),
        ):
            figures.append(
                of_runs(
                    f"store/{work} {at_a_time}{who}",
                    "a second",
                    its_bar,
                    rates[name, work, lanes],
                    rates[best, work, lanes],
                    best,
                    by=_rate,
                )
            )
    return figures


def _rate(runs: Sequence[float]) -> float:
    return percentile(runs, 0.75)


def _recovery_figures(name: str, runs: list[Recovery]) -> list[Figure]:
    elections = tuple(run.election_s for run in runs)
    driver = "" if name == OURS else f", driver {name}"
    figures = []
    for what, beyond in (
        ("writes", tuple(run.write_gap_s - run.election_s for run in runs)),
        ("watch", tuple(run.watch_gap_s - run.election_s for run in runs)),
    ):
        figures.append(
            Figure(
                f"store/{what} after a leader kill, beyond the election, worst{driver}",
                max(beyond),
                "s",
                RECOVERY_BAR if name == OURS else None,
                beyond,
                median(elections),
                "the election",
                elections,
            )
        )
    lost = tuple(float(run.leases_lost) for run in runs)
    figures.append(
        of_runs(
            f"store/leases lost by a leader kill{driver}",
            "leases",
            Bar("value", "==", 0),
            lost,
            by=sum,
        )
    )
    return figures
