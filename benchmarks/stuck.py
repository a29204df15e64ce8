# SPDX-License-Identifier: Apache-2.0
"""``stuck``: of four ranks one comes to stand still, in five ways; who is named, and when.

Jobs of ``muster local`` train at the same time, in one to four pods, and come to stand still one
fault after the other, with the sidecar's own ``--stuck-after``. A rank is named right if
``muster status``, the history, the sidecars' metrics and the Event name it and no other, and all
other ranks have left their stacks. Another job makes 10,000 steps without a fault: a first compile
of a minute, another one later, slow saves, and evaluations of two minutes by one rank and by all.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.figures import Bar, Figure, of_one, of_runs, say, say_load
from benchmarks.standing_job import LAYOUTS, RANKS, StandingJob
from controller.job_events import job_events
from controller.jobs import JobState
from rdzv.keys import JobKeys
from rdzv.records.job import HistoryEntry
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import KeyValue

JOBS, TIMES = 5, 4

FAULTS = {
    "loop": "is outside of any collective operation (standing.py:",
    "stop": "is stopped",
    "loader": "is in its data loader",
    "order": "waits in all_reduce",
    "read": "is outside of any collective operation (standing.py:",
}
"""The words expected of a rank in an endless loop, one that is stopped, one whose data loader is
deadlocked, one that calls collective operations in another order, and one whose storage does not
answer. Some of the third kind have the loader in processes of its own; some of the fourth call
both operations in the same line."""

CALM_STEPS = 10_000
STARTED_S, NAMED_S, TOLD_S, MOVED_S, CALM_S = 600.0, 240.0, 240.0, 600.0, 5400.0
"""Time limits, for what hangs."""
NOTHING_S = 25.0
"""Time after a fault in which there is nothing to ask for."""
PAUSE_S = 4.0
_NAMED = re.compile(r"rank (\d+) \(([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One fault. ``wrong``: what was not as it is to be; ``after_s`` until status named a rank."""

    kind: str
    after_s: float
    wrong: tuple[str, ...]


async def measure(jobs: int = JOBS, times: int = TIMES, calm: int = CALM_STEPS) -> list[Figure]:
    """Let ``jobs`` come to stand still ``times`` in each way; make ``calm`` steps beside them."""
    say_load()
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        async with asyncio.TaskGroup() as group:
            calming = group.create_task(_calm(root / "calm", jobs, calm)) if calm else None
            faulting = [
                group.create_task(_faults(root / f"job-{one}", one, times)) for one in range(jobs)
            ]
    figures = _judged([one for task in faulting for one in task.result()])
    if calming is not None:
        made, alarms = calming.result()
        name = f"stuck/false alarms in {made} steps with slow saves, evaluations and compiles"
        figures.append(of_one(name, "1", Bar("value", "==", 0), alarms))
    return figures


def _judged(outcomes: Sequence[Outcome]) -> list[Figure]:
    if not outcomes:
        return []
    right = [float(not one.wrong) for one in outcomes]
    for kind in FAULTS:
        of_kind = [not one.wrong for one in outcomes if one.kind == kind]
        say(f"{kind}: {sum(of_kind)} of {len(of_kind)} right")
    named = tuple(one.after_s for one in outcomes if not one.wrong) or (NAMED_S,)
    return [
        of_runs(
            f"stuck/share of {len(right)} ranks named right in status, history, metric and Event",
            "1",
            Bar("value", ">=", 0.95),
            right,
            by=fmean,
        ),
        of_runs("stuck/fault to its rank in muster status", "s", None, named),
    ]


@asynccontextmanager
async def _training(folder: Path, number: int, **settings: str) -> AsyncIterator[StandingJob]:
    job = StandingJob(folder, number)
    await job.start(**settings)
    try:
        yield job
    except TimeoutError as error:
        raise RuntimeError(f"{job.name} does not get on:\n{job.last_words()}") from error
    finally:
        await job.end()


async def _until(condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if await condition():
            return True
        await asyncio.sleep(PAUSE_S)
    return False


async def _trains(job: StandingJob, seconds: float) -> None:
    before = job.steps()

    async def does() -> bool:
        steps = job.steps()
        if job.ended or not all(0 <= b < s for b, s in zip(before, steps, strict=True)):
            before[:] = [s if b < 0 else b for b, s in zip(before, steps, strict=True)]
            return False
        return (await job.verdict())[0] == "training"

    if not await _until(does, seconds):
        raise TimeoutError


async def _faults(folder: Path, number: int, times: int) -> list[Outcome]:
    """Let one job come to stand still in turn; each rank does as often as any other."""
    chance = random.Random(number)
    plan = [*FAULTS] * times
    chance.shuffle(plan)
    guilty = list(range(RANKS)) * (len(plan) // RANKS + 1)
    chance.shuffle(guilty)
    found = []
    await asyncio.sleep(20 * (number % JOBS))  # not all import torch at once
    async with _training(folder, number) as job:
        await _trains(job, STARTED_S)
        await asyncio.sleep(20)
        for kind, rank in zip(plan, guilty, strict=False):
            found.append(await _fault(job, kind, rank))
            how = "; ".join(found[-1].wrong) or "right"
            say(
                f"{job.name}, {job.pods} pods: {kind} of rank {rank},"
                f" after {found[-1].after_s:.0f} s: {how}"
            )
    return found


async def _fault(job: StandingJob, kind: str, rank: int) -> Outcome:
    began_s, before = time.time(), len(_stuck(await job.states()))
    pod = job.pod_of(rank)
    said = ("", "")

    async def stuck() -> bool:
        nonlocal said
        said = await job.verdict()
        return said[0] == "stuck"

    job.begin(kind, rank)
    await asyncio.sleep(NOTHING_S)
    await _until(stuck, NAMED_S - NOTHING_S)
    after_s = time.time() - began_s
    wrong = []
    if _NAMED.findall(said[1]) != [(str(rank), pod)] or FAULTS[kind] not in said[1]:
        wrong.append(f"status: {': '.join(said)}")
    else:
        wrong += await _elsewhere(job, rank, pod, before)
        for other, run_dir in job.run_dirs().items():
            stacks = run_dir / "progress" / f"{other % job.ranks_a_pod}.stacks"
            if (other, kind) != (rank, "stop") and stacks.stat().st_mtime < began_s:
                wrong.append(f"stacks: none of rank {other}")
    job.release(kind, rank)
    await _trains(job, MOVED_S)

    async def tells() -> bool:
        entries = await job.states()
        return not entries or entries[-1].details["state"] == "training"

    await _until(tells, TOLD_S)  # or the next fault would be no news
    return Outcome(kind, after_s, tuple(wrong))


async def _elsewhere(job: StandingJob, rank: int, pod: str, before: int) -> list[str]:
    """Return what is wrong in the history, the Event and the metrics."""
    entries: list[HistoryEntry] = []

    async def tells() -> bool:
        entries[:] = _stuck(await job.states())[before:]
        return bool(entries)

    await _until(tells, TOLD_S)
    if len(entries) != 1:
        return [f"history: {[one.why for one in entries]}"]
    wrong = []
    if _NAMED.findall(entries[0].why) != [(str(rank), pod)]:
        wrong.append(f"history: {entries[0].why}")
    events = [f"{one.reason}: {one.message}" for one in events_of(job.name, entries[0])]
    if [_NAMED.findall(one) for one in events] != [[(str(rank), pod)]]:
        wrong.append(f"Event: {events}")
    if (named := await job.metrics()) != [{rank}] * job.pods:
        wrong.append(f"metrics: {named}")
    return wrong


def _stuck(entries: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    return [one for one in entries if one.details["state"] == "stuck"]


def events_of(name: str, entry: HistoryEntry) -> Sequence[Any]:
    """Return the Events that the controller makes of an entry in the history."""
    keys, nothing = JobKeys("local", name), Snapshot(revision=1)
    kv = KeyValue(keys.history_entry(1, entry.member, entry.what), entry.to_json(), 1, 1, 1, 0)
    before = JobState(keys, 0, nothing, listing_of(nothing))
    return job_events(before, JobState(keys, 1, nothing, listing_of(nothing), (kv,)), 0)


async def _calm(folder: Path, number: int, steps: int) -> tuple[int, int]:
    """Make so many steps; return how many were made, and how often the job was called stuck."""
    seen: list[str] = []
    # Two pods of two ranks, whose steps are short: a slow save is a long silence.
    number += next(one for one in range(3) if LAYOUTS[(number + one) % 3] == (2, 2))
    async with _training(folder, number, CALM="1", STEPS=str(steps), STEP_S="0.05") as job:

        async def done() -> bool:
            state, why = await job.verdict()
            if state == "stuck" and why not in seen:
                seen.append(why)
                say(f"calm, step {max(job.steps())}: {why}")
            return job.ended or max(job.steps()) >= steps - 1

        if not await _until(done, CALM_S) or max(job.steps()) < steps - 1:
            raise TimeoutError
        say(f"calm: {max(job.steps())} steps, {len(seen)} alarms")
        return steps, len(seen)
