# SPDX-License-Identifier: Apache-2.0
"""The end of a run on the screen: last words, a traceback, the result; and its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from console.local.launch.settings import LAUNCHER, LocalSettings
from console.local.nodes.run import LocalRun
from console.local.report.costs import beside, costs
from console.local.report.final_report import read_last_words
from console.local.report.picture import draw_picture
from console.local.report.summary import closing_lines, facts
from console.local.report.timeline import Timeline
from console.local.report.worker_errors import WorkerFailure

TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Native:
    """The same drill without Muster: its timeline, and its exit status."""

    timeline: Timeline
    status: int


def print_line(screen: Console, text: str) -> None:
    """Print a line as it is, without guessed colours and without breaking a path in two."""
    screen.print(text, highlight=False, markup=False, soft_wrap=True)


def show_last_words(screen: Console, run: LocalRun, status: int) -> None:
    """Print the job's last output: its result if it finished, else its failure."""
    failed = next((ending.node for ending in run.endings if ending.how == "failed"), None)
    rank_0 = run.last_leader or run.rounds.last_rank_0
    speaker = LAUNCHER if LAUNCHER in run.nodes else rank_0 if status == 0 else failed
    node = run.nodes.get(speaker or "")
    lines = read_last_words(node.launcher_log, 1 if status == 0 else TAIL_LINES) if node else []
    if node is None or not lines:
        return
    print_line(screen, f"\n{node.name} said last ({node.launcher_log}):")
    for line in lines:
        print_line(screen, f"  {line}")


def show_traceback(screen: Console, failure: WorkerFailure) -> None:
    """Print the traceback of the worker whose error ended the job."""
    if failure.traceback:
        print_line(screen, "\nTraceback (most recent call last):")
        for line in failure.traceback[-TAIL_LINES:]:
            print_line(screen, line)


def show_result(
    screen: Console, timeline: Timeline, native: Native | None, *, finished: bool
) -> None:
    """Print what the whole run came to, and what each event cost: in a box on a terminal."""
    title, rows = facts(timeline, finished=finished), result_rows(timeline, native)
    alone = f"torchrun alone: {_outcome(native)}" if native is not None else ""
    print_line(screen, "")
    if screen.is_terminal and rows:
        beside = native is not None
        table = Table(box=None, show_header=beside, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("", "Muster", "", *(["torchrun alone"] if beside else [])):
            table.add_column(heading, header_style="bold")
        for row in rows:
            table.add_row(*map(Text, row))
        inside = Group(table, Text(alone, style="dim")) if alone else table
        screen.print(Panel(inside, title=Text(title), title_align="left", expand=False))
    else:
        print_line(screen, title)
        if native is not None:
            rows = [(*row[:-1], f"torchrun: {row[-1]}") for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print_line(screen, f"  {'   '.join(cells)}".rstrip())
        if alone:
            print_line(screen, alone)
    for line in [*closing_lines(timeline), *_incomparable(timeline, native)]:
        print_line(screen, line)


def result_rows(timeline: Timeline, native: Native | None) -> list[tuple[str, ...]]:
    """Return a row for each change: what, the pause, the steps and, if known, torchrun's."""
    own = costs(timeline)
    if native is None:
        return [(one.what, one.pause, one.steps) for one in own]
    alone = beside(own, costs(native.timeline), finished=native.status == 0)
    return [(one.what, one.pause, one.steps, words) for one, words in zip(own, alone, strict=True)]


def _incomparable(timeline: Timeline, native: Native | None) -> Iterator[str]:
    """Yield a warning if the second run began where the first had been, and not at its start."""
    if native is None or not timeline.worlds.all:
        return
    own, others = timeline.worlds.all[0], native.timeline.worlds.all
    elsewhere = "the script keeps checkpoints outside of CHECKPOINT_DIR"
    if others and others[0].first_step > max(own.last_step, own.first_step + own.every):
        yield (
            f"warning: torchrun alone began at step {others[0].first_step}: {elsewhere}, so the two"
            " runs cannot be compared."
        )
    if not others and native.status == 0:
        yield f"warning: torchrun alone finished without a step: perhaps {elsewhere}."


def _outcome(native: Native) -> str:
    whole = facts(native.timeline, finished=native.status == 0)
    return f"{whole}; {native.timeline.moments[-1].detail}"


def write_report(
    directory: Path,
    settings: LocalSettings,
    timeline: Timeline,
    status: int,
    native: Native | None,
) -> bool:
    """Write the report; return whether that worked. A failure leaves the job's status as it is."""
    report = timeline.to_json(settings.line.command, status)
    report["costs"] = [one.to_json() for one in costs(timeline)]
    if native is not None:
        second = native.timeline.to_json(settings.line.command, native.status)
        report["native"] = second | {"costs": [one.to_json() for one in costs(native.timeline)]}
    alone, alone_finished = (native.timeline, native.status == 0) if native else (None, False)
    try:
        _replace(directory / "timeline.json", json.dumps(report, indent=1) + "\n")
        picture = draw_picture(timeline, alone, finished=status == 0, alone_finished=alone_finished)
        _replace(directory / "world.svg", picture)
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
