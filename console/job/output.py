# SPDX-License-Identifier: Apache-2.0
"""Output of views: JSON lines for programs, a table on a terminal, plain columns elsewhere."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Self, TextIO

import click

from agent.job_config import JobConfig
from agent.telemetry.logs import printable
from agent.verdict.states import Level
from agent.verdict.view import JobView, present_view
from console.job.reading import connected, following, look
from console.styling import COLOURS, broken, columns_of, is_styled, on_terminal

CLOCK_INTERVAL_S = 1.0
SILENCE = "; the store does not answer: this is what it said last"

WHY_MIN = 30
"""Sentences that would get fewer columns, or do not fit, are printed below their table."""

COLUMN_GAP = 2
KEPT = 2
"""The first columns, which are cut where they do not fit; those after them are left out."""

CELL_MIN = 8
"""The fewest columns that a cell is cut to."""


class Toned(str):
    """A cell with the colour of a level."""

    level: Level | None

    def __new__(cls, text: str, level: Level | None = None) -> Self:
        """Make a cell."""
        made = super().__new__(cls, text)
        made.level = level
        return made

    @classmethod
    def like(cls, cell: str, text: str) -> Self:
        """Return ``text`` in the colour of ``cell``."""
        return cls(text, getattr(cell, "level", None))


@dataclass(frozen=True, slots=True)
class Grid:
    """One table: a title of one or more lines, headings, rows.

    ``level``: the colour of the title's first line; None: the terminal's own. ``key``: the column
    that names a row where its last sentence stands below the table.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    level: Level | None = None
    key: int = 0


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
        else:
            print_grids(face.grids(view), sys.stdout)
        return
    if aside is not None:
        asyncio.run(aside())
    if not as_json and on_terminal(sys.stdout):
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
    with redrawing() as draw:
        async with connected(config, known=False) as client:
            mirror = client.mirror
            while True:
                sequence, until_s = mirror.sequence, monotonic() + interval_s
                shown = face.grids(present_view(client))
                while mirror.sequence <= sequence or monotonic() < until_s:
                    current = mirror.healthy(monotonic())
                    draw(shown, "" if current else SILENCE)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(CLOCK_INTERVAL_S):
                            await mirror.changed_after(sequence)
                            await asyncio.sleep(max(0.0, until_s - monotonic()))


@contextmanager
def redrawing() -> Iterator[Callable[[Sequence[Grid], str], None]]:
    """Yield a function that draws tables in place of the last ones, below the time of day.

    It gets a remark to put beside the time; empty for none.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    styled = is_styled(sys.stdout)
    with Live(console=Console(force_terminal=True), auto_refresh=False) as live:

        def draw(grids: Sequence[Grid], remark: str) -> None:
            clock = Grid(f"{datetime.now():%H:%M:%S}{remark}", (), ())
            text = rendered([clock, *grids], live.console.width, styled)
            live.update(Text.from_ansi(text), refresh=True)

        yield draw


def print_grids(grids: Sequence[Grid], stream: TextIO) -> None:
    """Print tables: for people on a terminal, of its width, or as plain columns elsewhere."""
    width = columns_of(stream) if on_terminal(stream) else None
    click.echo(rendered(grids, width, is_styled(stream)), file=stream, nl=False, color=True)


def rendered(grids: Sequence[Grid], width: int | None, styled: bool) -> str:
    """Return tables as text with lines of ``width`` columns, or whole lines if that is None."""
    return "\n".join("\n".join(_lines(grid, width, styled)) + "\n" for grid in grids)


def _lines(grid: Grid, width: int | None, styled: bool) -> Iterator[str]:
    for number, line in enumerate(grid.title.splitlines()):
        text = printable(line)
        text = text if width is None else broken(text, width, 2)
        level = grid.level if number == 0 else "note"
        yield _toned(text, level) if styled and grid.level is not None else text
    if not grid.rows:
        return
    rows = [[Toned.like(cell, printable(cell)) for cell in row] for row in grid.rows]
    headings, below = list(grid.headings), []
    if width is not None and headings[-1] == "WHY":
        room = width - sum(one + COLUMN_GAP for one in _widths(headings, rows)[:-1])
        if room < WHY_MIN or any(len(row[-1]) > room for row in rows):
            headings.pop()
            below = [(row[grid.key], why) for row in rows if (why := row.pop())]
    left_out: list[str] = []
    while width is not None and _sum(_widths(headings, rows)) > width and len(headings) > KEPT:
        left_out.insert(0, headings.pop())
        rows = [row[:-1] for row in rows]
    widths = _fitting(_widths(headings, rows), width)
    yield _row(headings, widths, styled=styled, bold=True)
    yield from (_row(row, widths, styled=styled) for row in rows)
    if left_out:
        yield broken(f"left out at this width: {', '.join(left_out)}", width or 0, 2)
    for name, why in below:
        indent = len(name) + 2
        yield broken(f"{name}: {why}", width or 0, indent if 2 * indent < (width or 0) else 2)


def _row(cells: Sequence[str], widths: Sequence[int], *, styled: bool, bold: bool = False) -> str:
    shown = []
    for cell, width in zip(cells, widths, strict=True):
        text = (cell if len(cell) <= width else f"{cell[: width - 1]}…").ljust(width)
        text = text.rstrip() if cell is cells[-1] else text
        level = getattr(cell, "level", None)
        if styled and bold:
            text = click.style(text, bold=True)
        elif styled and level is not None:
            text = _toned(text, level)
        shown.append(text)
    return (" " * COLUMN_GAP).join(shown).rstrip()


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(headings, *rows, strict=True)]


def _sum(widths: Sequence[int]) -> int:
    return sum(widths) + COLUMN_GAP * (len(widths) - 1)


def _fitting(widths: list[int], width: int | None) -> list[int]:
    """Return the widths of columns that fit into ``width``: the widest are cut first."""
    if width is None:
        return widths
    fitting = list(widths)
    while _sum(fitting) > width and max(fitting) > CELL_MIN:
        fitting[fitting.index(max(fitting))] -= 1
    return fitting


def _toned(text: str, level: Level | None) -> str:
    return text if level is None else click.style(text, fg=COLOURS[level])
