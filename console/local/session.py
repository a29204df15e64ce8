# SPDX-License-Identifier: Apache-2.0
"""``muster local`` from its first line to its last: set-up, display, report and clean-up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from console.local.followed_job import following
from console.local.launch.settings import LAUNCHER, LocalSettings, own_environment
from console.local.nodes.events import Event
from console.local.nodes.run import LocalRun
from console.local.processes.marked import adopt_orphans
from console.local.report.final_report import read_last_words
from console.local.report.picture import draw_picture
from console.local.report.repeats import Repeats
from console.local.report.rounds import RoundFollower
from console.local.report.summary import closing_lines
from console.local.report.timeline import Moment, Timeline
from console.local.report.worker_errors import WorkerFailure
from console.local.table import draw_table
from console.wrapping import broken
from launcher_shim.exit_status import EXIT_FAULT
from rdzv.keys import JobKeys

REDRAW_INTERVAL_S = 0.25
TAIL_LINES = 15

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
) -> int:
    """Run the job and show it; return the exit status of ``muster local``.

    ``as_json`` prints each moment as a JSON object, and nothing else.
    """
    repeats = Repeats()

    def show(moment: Moment) -> None:
        lines = [json.dumps(moment.to_json())] if as_json else repeats.lines(moment)
        for line in lines:
            _print_line(screen, line, INDENT)

    timeline = Timeline(time.monotonic, show)
    keys = JobKeys(settings.namespace, settings.job)
    rounds = RoundFollower(keys, settings.job, settings.line.slots, timeline)
    if not as_json:
        _print_line(screen, f"logs of every node: {places.logs}")
    async with AsyncExitStack() as stack:
        run_root = await stack.enter_async_context(_swept(settings.run))
        job = None
        if not settings.native:
            job = await stack.enter_async_context(following(settings, rounds))
        run = LocalRun(
            settings,
            events,
            timeline,
            rounds,
            job,
            run_root=run_root,
            log_root=places.logs,
            randomness=random.Random(settings.run),
        )
        stop = stack.enter_context(_Stop(run))
        if screen.is_terminal and not as_json:
            await stack.enter_async_context(_table(screen, run))
        status, reason = await run.until_over()
        if stop.signal is not None:
            status, reason = 128 + stop.signal, f"ended by {stop.signal.name}"
    finished = status == 0
    if settings.strict and finished and timeline.events_without_effect:
        status = EXIT_FAULT
    timeline.record("end", "end", "", f"{reason}; exit status {status}")
    written = places.report is not None and await asyncio.to_thread(
        _write_report, places.report, settings, timeline, status
    )
    if as_json:
        return status
    if run.given_up_for is not None:
        _show_traceback(screen, run.given_up_for)
    else:
        await asyncio.to_thread(_show_last_words, screen, run, status)
    for line in closing_lines(timeline, finished=finished):
        _print_line(screen, line, 0)
    if written:
        _print_line(screen, f"report: {places.report}/timeline.json, {places.report}/world.svg")
    return status


def _print_line(screen: Console, text: str, indent: int | None = None) -> None:
    """Print a line as it is, without guessed colours and without breaking a path in two.

    ``indent``: on a terminal the line is wrapped at words, with this indent for the later lines.
    """
    if indent is not None and screen.is_terminal:
        text = broken(text, screen.width, indent)
    screen.print(text, highlight=False, markup=False, soft_wrap=True)


@asynccontextmanager
async def _swept(run: str) -> AsyncIterator[Path]:
    """Yield the directory of the nodes' disks; end the run's processes after use.

    A sweeper ends them, even if this process is killed. The directory's name is short because a
    unix socket's path has 107 bytes at most.
    """
    adopt_orphans()
    directory = await asyncio.to_thread(tempfile.mkdtemp, prefix="muster-")
    sweeper = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "console.local.processes.sweeper", run, directory),
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


def _show_last_words(screen: Console, run: LocalRun, status: int) -> None:
    """Print the job's last output: its result if it finished, else its failure."""
    failed = next((ending.node for ending in run.endings if ending.how == "failed"), None)
    rank_0 = run.last_leader or run.rounds.last_rank_0
    speaker = LAUNCHER if LAUNCHER in run.nodes else rank_0 if status == 0 else failed
    node = run.nodes.get(speaker or "")
    lines = read_last_words(node.launcher_log, 1 if status == 0 else TAIL_LINES) if node else []
    if node is None or not lines:
        return
    _print_line(screen, f"\n{node.name} said last ({node.launcher_log}):")
    for line in lines:
        _print_line(screen, f"  {line}")


def _show_traceback(screen: Console, failure: WorkerFailure) -> None:
    """Print the traceback of the worker whose error ended the job."""
    if failure.traceback:
        _print_line(screen, "\nTraceback (most recent call last):")
        for line in failure.traceback[-TAIL_LINES:]:
            _print_line(screen, line)


def _write_report(
    directory: Path, settings: LocalSettings, timeline: Timeline, status: int
) -> bool:
    """Write the report; return whether that worked. A failure leaves the job's status as it is."""
    report = timeline.to_json(settings.line.command, status)
    try:
        _replace(directory / "timeline.json", json.dumps(report, indent=1) + "\n")
        _replace(directory / "world.svg", draw_picture(timeline))
    except OSError as error:
        click.echo(f"muster: --report {directory}: cannot be written ({error.strerror})", err=True)
        return False
    return True


def _replace(path: Path, text: str) -> None:
    """Write a file and rename it into place, so that a full disk leaves no half-written one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
