# SPDX-License-Identifier: Apache-2.0
"""Printing of rows of jobs: a table, JSON or YAML, once or at each change."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

import click

from console.job.output import CLOCK_INTERVAL_S, Grid, print_grids, rendered
from console.job.rows import JobLine, job_grid, pod_grid
from console.style import is_styled, on_terminal

Form = Literal["table", "wide", "json", "yaml"]


@dataclass(frozen=True, slots=True)
class JobTable:
    """The form of the output. ``one``: it is about one job, so its pods are shown, too.

    ``everywhere``: jobs of several namespaces are shown. ``none``: the sentence if there is no job.
    """

    form: Form = "table"
    one: bool = False
    everywhere: bool = False
    none: str = "there is no job"

    def grids(self, jobs: Sequence[JobLine]) -> list[Grid]:
        """Return the tables."""
        if not jobs:
            return [Grid(self.none, (), ())]
        wide = self.form == "wide"
        grids = [job_grid(jobs, wide=wide, everywhere=self.everywhere)]
        if self.one:
            does = [Grid(f"→ {job.do}", (), (), job.level) for job in jobs if job.do]
            return [*grids, *does, *(pod_grid(job.pods, wide=wide) for job in jobs if job.pods)]
        return grids

    def show(self, jobs: Sequence[JobLine]) -> None:
        """Print the jobs once."""
        if self.form in ("table", "wide"):
            print_grids(self.grids(jobs), sys.stdout)
        else:
            self._print_objects(jobs)

    async def follow(self, states: AsyncIterator[Sequence[JobLine]]) -> None:
        """Show each of ``states``: redraw on a terminal, else print the jobs that have changed."""
        async with aclosing(states) as found:  # type: ignore[type-var]
            if self.form in ("table", "wide") and on_terminal(sys.stdout):
                await self._redraw(found)
            else:
                await self._print_changes(found)

    async def _redraw(self, states: AsyncIterator[Sequence[JobLine]]) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        styled = is_styled(sys.stdout)
        with Live(console=Console(force_terminal=True), auto_refresh=False) as live:
            following, shown = asyncio.ensure_future(anext(states)), [Grid("…", (), ())]
            try:
                while True:
                    done, _ = await asyncio.wait({following}, timeout=CLOCK_INTERVAL_S)
                    if done:
                        shown = self.grids(following.result())
                        following = asyncio.ensure_future(anext(states))
                    clock = Grid(f"{datetime.now():%H:%M:%S}", (), ())
                    text = rendered([clock, *shown], live.console.width, styled)
                    live.update(Text.from_ansi(text), refresh=True)
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await following

    async def _print_changes(self, states: AsyncIterator[Sequence[JobLine]]) -> None:
        printed: dict[tuple[str, str], JobLine] = {}
        async for jobs in states:
            known = {(job.namespace, job.name): job for job in jobs}
            changed = [
                job
                for key, job in known.items()
                if key not in printed or _without_ages(job) != _without_ages(printed[key])
            ]
            printed = known
            if not changed:
                continue
            if self.form in ("table", "wide"):
                self._print_rows(changed, headings=not printed.keys() - {*_keys(changed)})
            else:
                self._print_objects(changed)
            sys.stdout.flush()

    def _print_rows(self, jobs: Sequence[JobLine], *, headings: bool) -> None:
        """Print tables; those of later changes without headings if only some jobs changed."""
        text = rendered(self.grids(jobs), None, False)
        lines = text.splitlines()
        click.echo("\n".join(lines if headings or self.one else lines[1:]))

    def _print_objects(self, jobs: Sequence[JobLine]) -> None:
        objects = [self._object(job) for job in jobs]
        if self.form == "json":
            for one in objects:
                click.echo(json.dumps(one))
            return
        from ruamel.yaml import YAML

        for one in objects:
            text, yaml = io.StringIO(), YAML()
            yaml.explicit_start = True
            yaml.dump(one, text)
            click.echo(text.getvalue(), nl=False)

    def _object(self, job: JobLine) -> dict[str, object]:
        pods = {"pods": [pod.as_json() for pod in job.pods]} if self.one else {}
        return {**job.as_json(), **pods}


def form_of(*, as_json: bool, as_yaml: bool, wide: bool) -> Form:
    """Return the form that the options of a command ask for."""
    return "json" if as_json else "yaml" if as_yaml else "wide" if wide else "table"


def _without_ages(job: JobLine) -> JobLine:
    pods = tuple(replace(pod, age_s=None) for pod in job.pods)
    saved_s = None if job.saved_s is None else 0.0
    return replace(job, age_s=None, saved_s=saved_s, pods=pods)


def _keys(jobs: Sequence[JobLine]) -> list[tuple[str, str]]:
    return [(job.namespace, job.name) for job in jobs]
