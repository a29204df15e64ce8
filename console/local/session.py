# SPDX-License-Identifier: Apache-2.0
"""``muster local`` from its first line to its last: set-up, display, report and clean-up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console
from rich.live import Live

from console.local.job_in_store import RoundFollower, following
from console.local.processes import adopt_orphans
from console.local.run import LocalRun
from console.local.screen import (
    Native,
    Repeats,
    draw_table,
    print_line,
    show_last_words,
    show_result,
    show_traceback,
    write_report,
)
from console.local.settings import Event, LocalSettings, own_environment
from console.local.timeline import Moment, Timeline
from console.styling import broken
from console.whereabouts import RunningJob, locked, published_run
from launcher_shim.exit_status import EXIT_FAULT, EXIT_KILLED
from rdzv.keys import JobKeys

T = TypeVar("T")

REDRAW_INTERVAL_S = 0.25
PATIENCE_S = 60.0
"""Time that native torchrun gets besides twice that of Muster's run: starts take long."""

LOCK = ".muster-local"
"""The file in the directory of logs that a run holds a lock on."""

LOOK = "muster status, muster why, muster history, muster drain node-1"

NATIVE_SHOWN = ("event", "training", "end")
"""The kinds of moments of native torchrun's run that are shown."""

INDENT = 32
"""Columns before the detail of a moment."""


@dataclass(frozen=True, slots=True)
class Directories:
    """The directories of a run: ``logs`` is kept; ``report`` is for the report, None without."""

    logs: Path
    report: Path | None


async def run_session(
    settings: LocalSettings,
    events: Sequence[Event],
    places: Directories,
    screen: Console,
    *,
    as_json: bool = False,
    compares: bool = False,
) -> int:
    """Run the job and show it; return the exit status of ``muster local``.

    ``as_json`` prints each moment as a JSON object, and nothing else. ``compares``: run the same
    drill on native torchrun after that.
    """
    pid, what = json.dumps({"pid": os.getpid()}), f"--log-dir {places.logs}"
    await asyncio.to_thread(places.logs.mkdir, parents=True, exist_ok=True)
    lock = locked(places.logs / LOCK, pid, what, "choose another directory")
    async with _in_thread(lock) as held:
        if not held:
            click.echo(f"muster: {what}: no locks here; start no other run with it", err=True)
        return await _run_locked(
            settings, events, places, screen, as_json=as_json, compares=compares
        )


@asynccontextmanager
async def _in_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a context manager that blocks on the disk."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def _run_locked(
    settings: LocalSettings,
    events: Sequence[Event],
    places: Directories,
    screen: Console,
    *,
    as_json: bool,
    compares: bool,
) -> int:
    if not as_json:
        print_line(screen, f"logs of every node: {places.logs}")
    ended = await _run(settings, events, places.logs, screen, as_json=as_json)
    run, timeline, status, finished = ended.run, ended.timeline, ended.status, ended.finished
    if not as_json:
        if run.given_up_for is not None:
            show_traceback(screen, run.given_up_for)
        else:
            await asyncio.to_thread(show_last_words, screen, run, status)
    native = None
    if compares and finished:
        allowed_s = 2 * timeline.now_s() + PATIENCE_S
        native = await _compared(
            settings, events, places.logs, screen, as_json=as_json, allowed_s=allowed_s
        )
    written = places.report is not None and await asyncio.to_thread(
        write_report, places.report, settings, timeline, status, native
    )
    if as_json:
        return status
    show_result(screen, timeline, native, finished=finished)
    if written:
        print_line(screen, f"report: {places.report}/timeline.json, {places.report}/world.svg")
    return status


async def _compared(
    settings: LocalSettings,
    events: Sequence[Event],
    logs: Path,
    screen: Console,
    *,
    as_json: bool,
    allowed_s: float,
) -> Native:
    """Run the same drill without Muster, with checkpoints of its own; end it if it stands still."""
    own = logs / "native"
    checkpoints = own / "checkpoints"
    await asyncio.to_thread(shutil.rmtree, checkpoints, ignore_errors=True)
    await asyncio.to_thread(checkpoints.mkdir, parents=True)
    settings = replace(
        settings, native=True, strict=False, checkpoints=checkpoints, run=uuid.uuid4().hex
    )
    if not as_json:
        print_line(screen, f"\nthe same drill on torchrun alone, for {allowed_s:.0f} s at most:")
    ended = await _run(settings, events, own, screen, as_json=as_json, allowed_s=allowed_s)
    return Native(ended.timeline, ended.status)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A run that has ended. ``finished``: its job did, whatever ``status`` says with --strict."""

    run: LocalRun
    timeline: Timeline
    status: int
    finished: bool


async def _run(
    settings: LocalSettings,
    events: Sequence[Event],
    logs: Path,
    screen: Console,
    *,
    as_json: bool,
    allowed_s: float | None = None,
) -> _Ended:
    """Run a job to its end, or for ``allowed_s``, and show it."""
    repeats, compared = Repeats(), allowed_s is not None

    def show(moment: Moment) -> None:
        if as_json:
            native = {"native": True} if compared else {}
            print_line(screen, json.dumps(moment.to_json() | native))
            return
        if compared and moment.kind not in NATIVE_SHOWN:
            return
        for line in repeats.lines(moment):
            whole = not screen.is_terminal
            print_line(screen, line if whole else broken(line, screen.width, INDENT))

    timeline = Timeline(time.monotonic, show)
    keys = JobKeys(settings.namespace, settings.job)
    rounds = RoundFollower(keys, settings.job, settings.line.slots, timeline)
    async with AsyncExitStack() as stack:
        run_root = await stack.enter_async_context(_swept(settings.run))
        job = None
        if not settings.native:
            job = await stack.enter_async_context(following(settings, rounds))
            own = RunningJob(
                job.endpoints, settings.namespace, settings.job, os.getpid(), str(logs)
            )
            known = await stack.enter_async_context(_in_thread(published_run(own)))
            if known and not as_json:
                print_line(screen, f"from another shell: {LOOK}")
        run = LocalRun(
            settings,
            events,
            timeline,
            rounds,
            job,
            run_root=run_root,
            log_root=logs,
            randomness=random.Random(settings.run),
        )
        stop = stack.enter_context(_Stop(run))
        if screen.is_terminal and not as_json:
            await stack.enter_async_context(_table(screen, run))
        if allowed_s is not None:
            expiry = asyncio.get_running_loop().call_later(allowed_s, stop.expire)
            stack.callback(expiry.cancel)
        status, reason = await run.until_over()
        if stop.expired:
            status, reason = EXIT_KILLED, "it stood still"
        if stop.signal is not None:
            status, reason = 128 + stop.signal, f"ended by {stop.signal.name}"
    finished = status == 0
    if settings.strict and finished and timeline.events_without_effect:
        status = EXIT_FAULT
    timeline.record("end", "end", "", f"{reason}; exit status {status}")
    return _Ended(run, timeline, status, finished)


@asynccontextmanager
async def _swept(run: str) -> AsyncIterator[Path]:
    """Yield the directory of the nodes' disks; end the run's processes after use.

    A sweeper ends them, even if this process is killed. The directory's name is short because a
    unix socket's path has 107 bytes at most.
    """
    adopt_orphans()
    directory = await asyncio.to_thread(tempfile.mkdtemp, prefix="muster-")
    sweeper = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "console.local.processes", run, directory),
        stdin=asyncio.subprocess.PIPE,
        env=own_environment(os.environ),
        start_new_session=True,
    )
    assert sweeper.stdin is not None
    try:
        yield Path(directory)
    finally:
        sweeper.stdin.close()
        await sweeper.wait()


class _Stop:
    """The handler of Ctrl-C and SIGTERM: one ends the run gently, a second one at once."""

    def __init__(self, run: LocalRun) -> None:
        self.signal: signal.Signals | None = None
        self.expired = False
        self._run = run

    def __enter__(self) -> _Stop:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def expire(self) -> None:
        """End the run at its deadline, as a signal does."""
        self.expired = True
        self._run.interrupt()

    def _stop(self, number: signal.Signals) -> None:
        if self.signal is None:
            self.signal = number
            self._run.interrupt()
        else:
            self._run.abandon()


@asynccontextmanager
async def _table(screen: Console, run: LocalRun) -> AsyncIterator[None]:
    with Live(draw_table(run), console=screen, auto_refresh=False, transient=True) as live:

        async def redraw() -> None:
            while True:
                live.update(draw_table(run), refresh=True)
                await asyncio.sleep(REDRAW_INTERVAL_S)

        task = asyncio.create_task(redraw(), name="table")
        try:
            yield
        finally:
            task.cancel()
