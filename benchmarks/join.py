# SPDX-License-Identifier: Apache-2.0
"""``join``: N of torch's own handlers join at once, each at its own sidecar, beside native c10d.

A round starts once every sidecar is registered and every handler connected, and lasts until the
last handler has its world. Native: the same handlers on one TCPStore server of torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_runs, say
from benchmarks.worker import Worker, worker

SIZES = (64, 256)
ROUNDS = 3
HANDLER_PROCESSES = 2
SIDECAR_PROCESSES = 2
JOIN_TIMEOUT_S = 90.0
LEAD_S = 0.5
"""Time between the order to join and the join, so that all processes start together."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of one round; ``compare_sets`` is the sum over all handlers."""

    seconds: float
    compare_sets: int
    worlds: int
    failures: tuple[str, ...]

    @property
    def together(self) -> bool:
        return self.worlds == 1 and not self.failures


async def measure(sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> list[Figure]:
    """Join in turns, natively and through sidecars."""
    figures: list[Figure] = []
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(etcd_server())
        handlers = [
            await stack.enter_async_context(worker("benchmarks.join_handlers"))
            for _ in range(HANDLER_PROCESSES)
        ]
        sidecars = [
            await stack.enter_async_context(worker("benchmarks.sidecar_parts"))
            for _ in range(SIDECAR_PROCESSES)
        ]
        for size in sizes:
            ours: list[Joined] = []
            native: list[Joined] = []
            for turn in range(rounds):
                native.append(await _native(handlers, size, f"native-{size}-{turn}"))
                _say(f"native, {size} nodes", native[-1])
                async with _job(sidecars, endpoint, size, f"join-{size}-{turn}") as ports:
                    ours.append(await _join(handlers, ports, f"join-{size}-{turn}"))
                _say(f"muster, {size} nodes", ours[-1])
            figures += _figures(size, ours, native)
    return figures


def _figures(size: int, ours: list[Joined], native: list[Joined]) -> list[Figure]:
    return [
        of_runs(
            f"join/{size}/all in one round",
            "1",
            Bar("value", "==", 1),
            [float(joined.together) for joined in ours],
            [float(joined.together) for joined in native],
            "native c10d",
        ),
        of_runs(
            f"join/{size}/compare-and-sets a handler",
            "1",
            Bar("value", "==", 1),
            [joined.compare_sets / size for joined in ours],
            [joined.compare_sets / size for joined in native],
            "native c10d",
        ),
        of_runs(
            f"join/{size}/seconds",
            "s",
            None,
            [joined.seconds for joined in ours],
            [joined.seconds for joined in native],
            "native c10d",
        ),
    ]


async def _native(handlers: Sequence[Worker], size: int, run_id: str) -> Joined:
    where = await handlers[0].ask("host")
    return await _join(handlers, [where["port"]] * size, run_id)


@asynccontextmanager
async def _job(
    sidecars: Sequence[Worker], endpoint: str, size: int, job: str
) -> AsyncIterator[list[int]]:
    """Run ``size`` registered sidecars; yields their ports."""
    members = [f"node-{number}" for number in range(size)]
    began_s = time.monotonic()
    ports = await asyncio.gather(
        *(
            one.ask(
                "start",
                timeout_s=120,
                endpoint=endpoint,
                job=job,
                members=share,
                min_nodes=size,
                max_nodes=size,
                run_dirs=None,
            )
            for one, share in zip(sidecars, _shares(members, len(sidecars)), strict=True)
        )
    )
    registered_s = time.monotonic() - began_s
    say(f"  {size} sidecars registered in {registered_s:.1f} s")
    try:
        yield [port for share in ports for port in share]
    finally:
        await asyncio.gather(*(one.ask("stop") for one in sidecars))


async def _join(handlers: Sequence[Worker], ports: Sequence[int], run_id: str) -> Joined:
    size = len(ports)
    numbers = range(size)
    await asyncio.gather(
        *(
            one.ask(
                "prepare",
                run_id=run_id,
                nodes=size,
                numbers=mine,
                ports=theirs,
                join_timeout_s=JOIN_TIMEOUT_S,
            )
            for one, mine, theirs in zip(
                handlers,
                _shares(numbers, len(handlers)),
                _shares(ports, len(handlers)),
                strict=True,
            )
        )
    )
    at_s = time.monotonic() + LEAD_S
    answers: list[list[Any]] = [
        answer
        for part in await asyncio.gather(
            *(one.ask("join", timeout_s=JOIN_TIMEOUT_S + 30, at_s=at_s) for one in handlers)
        )
        for answer in part
    ]
    await asyncio.gather(*(one.ask("stop") for one in handlers))
    joined = [answer for answer in answers if len(answer) == 5]
    ranks = {rank for _, rank, _, _, _ in joined}
    worlds = {(number, world_size) for number, _, world_size, _, _ in joined}
    failed = [answer for answer in answers if len(answer) == 2]
    failures = [str(reason) for reason, _ in failed]
    if worlds == {(0, size)} and ranks != set(range(size)):
        failures.append("ranks are missing or given twice")
    return Joined(
        # If a handler failed, the round counts as the whole timeout.
        seconds=JOIN_TIMEOUT_S if failures else max(seconds for *_, seconds in joined),
        compare_sets=sum(joins for *_, joins, _ in joined) + sum(joins for _, joins in failed),
        worlds=len(worlds),
        failures=tuple(failures),
    )


def _shares(items: Sequence[Any], parts: int) -> list[list[Any]]:
    return [list(items[part::parts]) for part in range(parts)]


def _say(who: str, joined: Joined) -> None:
    problems = f", failures: {joined.failures[:3]}" if joined.failures else ""
    say(
        f"{who}: {joined.seconds:.2f} s, {joined.compare_sets} compare-and-sets, "
        f"{joined.worlds} world(s){problems}"
    )
