# SPDX-License-Identifier: Apache-2.0
"""Output of views: JSON lines for programs, a table on a terminal, plain columns elsewhere."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING

import click

from agent.config.sidecar import JobConfig
from agent.telemetry.logs import printable
from console.job.reading import connected, following, look, present_view
from console.job.view import JobView
from console.wrapping import broken

if TYPE_CHECKING:
    from rich.console import RenderableType


CLOCK_INTERVAL_S = 1.0

WHY_MIN = 30
"""Sentences that would get fewer columns than this are printed below their table."""

COLUMN_GAP = 2


@dataclass(frozen=True, slots=True)
class Grid:
    """One table: a title of one or more lines, headings, rows."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Face:
    """The forms in which a command shows a view: grids, one line per change, and JSON."""

    grids: Callable[[JobView], Sequence[Grid]]
    line: Callable[[JobView], str]
    json: Callable[[JobView], object]


def show(
    config: JobConfig,
    face: Face,
    *,
    as_json: bool,
    watch: bool,
    interval_s: float,
    aside: Callable[[], Coroutine[None, None, None]] | None = None,
) -> None:
    """Show the job once, or follow it until Ctrl-C, at most once per ``interval_s``.

    ``aside`` fetches what else ``face`` shows: concurrently with the single read, or before
    following.
    """
    if not watch:
        view = asyncio.run(_look(config, aside))
        if as_json:
            click.echo(json.dumps(face.json(view)))
        elif sys.stdout.isatty():
            from rich.console import Console

            screen = Console()
            screen.print(_table(face.grids(view), screen.width))
        else:
            click.echo(_columns(face.grids(view)), nl=False)
        return
    if aside is not None:
        asyncio.run(aside())
    if not as_json and sys.stdout.isatty():
        asyncio.run(_follow_on_terminal(config, face, interval_s))
    else:
        asyncio.run(_follow_in_lines(config, face, interval_s, as_json=as_json))


async def _look(
    config: JobConfig, aside: Callable[[], Coroutine[None, None, None]] | None
) -> JobView:
    if aside is None:
        return await look(config)
    view, _ = await asyncio.gather(look(config), aside())
    return view


async def _follow_in_lines(
    config: JobConfig, face: Face, interval_s: float, *, as_json: bool
) -> None:
    """Print the view as one line, and again whenever that line changes."""
    printed = ""
    async with following(config) as views:
        async for view in views:
            line = json.dumps(face.json(view)) if as_json else printable(face.line(view))
            if line != printed:
                click.echo(line)
                sys.stdout.flush()
                printed = line
                await asyncio.sleep(interval_s)


async def _follow_on_terminal(config: JobConfig, face: Face, interval_s: float) -> None:
    """Redraw the view at each change, and the clock above it once a second."""
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        async with connected(config) as client:
            mirror = client.mirror
            while True:
                sequence, until_s = mirror.sequence, monotonic() + interval_s
                shown = face.grids(present_view(client))
                while mirror.sequence <= sequence or monotonic() < until_s:
                    clock = _clock(datetime.now(), current=mirror.healthy(monotonic()))
                    live.update(_table([clock, *shown], live.console.width), refresh=True)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(CLOCK_INTERVAL_S):
                            await mirror.changed_after(sequence)
                            await asyncio.sleep(max(0.0, until_s - monotonic()))


def _room_for_why(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int:
    """Return the width that the other columns leave for the last one, which holds sentences."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return width - sum(width + COLUMN_GAP for width in widths[:-1])


def _clock(now: datetime, *, current: bool) -> Grid:
    """Return a title with the time of day and, if the store is silent, a remark on that."""
    silence = "" if current else "; the store does not answer: this is what it said last"
    return Grid(f"{now:%H:%M:%S}{silence}", (), ())


def _title(grid: Grid) -> str:
    return "\n".join(map(printable, grid.title.splitlines()))


def _columns(grids: Sequence[Grid]) -> str:
    parts = []
    for grid in grids:
        rows = [grid.headings, *([printable(cell) for cell in row] for row in grid.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(grid.headings))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        body = lines if grid.rows else []
        parts.append("\n".join([*([_title(grid)] if grid.title else []), *body]) + "\n")
    return "\n".join(parts)


def _table(grids: Sequence[Grid], width: int) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown: list[RenderableType] = []
    for grid in grids:
        if shown:
            shown.append(Text())
        if not grid.rows:
            # Leave out headings without rows; rich would not even show the title without columns.
            shown.append(Text(_title(grid)))
            continue
        rows = [[printable(cell) for cell in row] for row in grid.rows]
        headings, below = list(grid.headings), []
        if headings[-1] == "WHY" and _room_for_why(headings, rows, width) < WHY_MIN:
            headings.pop()
            below = [(row[0], why) for row in rows if (why := row.pop())]
        table = Table(title=Text(_title(grid)), title_justify="left", box=None, pad_edge=False)
        for heading in headings:
            table.add_column(heading, header_style="bold", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        shown.append(table)
        shown += [Text(broken(f"{name}: {why}", width, len(name) + 2)) for name, why in below]
    return Group(*shown)
