# SPDX-License-Identifier: Apache-2.0
"""``muster list``, ``muster get``: jobs, each in a row, and the pods of one; or JSON or YAML."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from time import time
from typing import Any, Literal

import click

from agent.job_config import AccessConfig, JobConfig
from agent.verdict.view import JobView
from console.help import Command
from console.job.output import CLOCK_INTERVAL_S, Grid, print_grids, redrawing, rendered
from console.job.reading import following, look, look_at_all
from console.job.rows import WHY, JobLine, PodLine, job_line
from console.job.status_json import status_json
from console.options import configured_by, job_names, shown_with
from console.styling import on_terminal
from console.whereabouts import found_running
from rdzv.settings import settings_of

Form = Literal["table", "wide", "json", "yaml"]

ANEW_S = 2.0
"""Interval at which all jobs of a store are read again: a single one is followed instead."""

IN_THE_CLUSTER = "console.remote.get:in_the_cluster"
"""The function that runs both commands in a cluster."""


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
        with redrawing() as draw:
            following, shown = asyncio.ensure_future(anext(states)), [Grid("…", (), ())]
            try:
                while True:
                    done, _ = await asyncio.wait({following}, timeout=CLOCK_INTERVAL_S)
                    if done:
                        shown = self.grids(following.result())
                        following = asyncio.ensure_future(anext(states))
                    draw(shown, "")
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


def _listing(command: Callable[..., None]) -> Callable[..., Any]:
    """Decorate a command with the options that both have."""
    shared = (
        configured_by(AccessConfig, elsewhere=IN_THE_CLUSTER),
        click.option("-n", "--namespace", metavar="NAME", help="Show those of one namespace."),
        click.option(
            "-A",
            "--all-namespaces",
            "everywhere",
            is_flag=True,
            help="Show those of all namespaces.",
        ),
        click.option("--wide", is_flag=True, help="Show more columns."),
        partial(shown_with, forms=("json", "wide", "yaml")),
    )
    return reduce(lambda made, add: add(made), reversed(shared), command)


@click.command(
    "list",
    cls=Command,
    epilog="\b\nExamples:\n  muster list\n  muster list -n team-a -o json\n  muster list -A -w",
)
@_listing
def list_jobs(
    config: AccessConfig,
    namespace: str | None,
    everywhere: bool,
    as_json: bool,
    as_yaml: bool,
    wide: bool,
    watch: bool,
    interval_s: float,
) -> None:
    """List jobs: phase, nodes, step, steps a second, and the age of the last save.

    Those of a namespace of the cluster; if a store is named, those of the store.
    """
    form = form_of(as_json=as_json, as_yaml=as_yaml, wide=wide)
    _show_all(config, None if everywhere else namespace, JobTable(form), watch, interval_s)


@click.command(
    cls=Command,
    epilog="\b\nExamples:\n  muster get\n  muster get digits\n  muster get digits -w\n"
    "  muster get digits -o yaml",
)
@_listing
@click.argument("named", metavar="[JOB]", required=False, shell_complete=job_names)
def get(
    config: AccessConfig,
    named: str | None,
    namespace: str | None,
    everywhere: bool,
    as_json: bool,
    as_yaml: bool,
    wide: bool,
    watch: bool,
    interval_s: float,
) -> None:
    """Show a job and its pods, one a row: rank, node, spot or not, step, and why it waits.

    Without a JOB it shows all, as muster list does.
    """
    form = form_of(as_json=as_json, as_yaml=as_yaml, wide=wide)
    if named is None:
        where = None if everywhere else namespace
        return _show_all(config, where, JobTable(form), watch, interval_s)
    access = {name: getattr(config, name) for name in settings_of(AccessConfig)}
    local = found_running({"job": named, "namespace": namespace}, os.environ)
    if namespace is None and local is not None and (local.endpoints,) == config.etcd_endpoints:
        namespace = local.namespace
    job = JobConfig(**access, namespace=namespace or "default", job=named)
    table = JobTable(form, one=True)
    if watch:
        asyncio.run(table.follow(_one_followed(job, interval_s)))
    else:
        table.show([_line(asyncio.run(look(job)))])


def _show_all(
    config: AccessConfig, namespace: str | None, table: JobTable, watch: bool, interval_s: float
) -> None:
    where = f" in namespace {namespace}" if namespace else ""
    none = f"the store has no job{where}; muster local -- torchrun train.py starts one here"
    table = JobTable(table.form, everywhere=True, none=none)
    if watch:
        asyncio.run(table.follow(_all_followed(config, namespace, max(interval_s, ANEW_S))))
    else:
        table.show(asyncio.run(_all(config, namespace)))


async def _one_followed(job: JobConfig, interval_s: float) -> AsyncIterator[Sequence[JobLine]]:
    async with following(job) as views:
        async for view in views:
            yield [_line(view)]
            await asyncio.sleep(interval_s)


async def _all_followed(
    config: AccessConfig, namespace: str | None, interval_s: float
) -> AsyncIterator[Sequence[JobLine]]:
    while True:
        yield await _all(config, namespace)
        await asyncio.sleep(interval_s)


async def _all(config: AccessConfig, namespace: str | None) -> list[JobLine]:
    return [_line(view) for view in await look_at_all(config, namespace)]


def _line(view: JobView) -> JobLine:
    now_unix_s = time()
    status: Mapping[str, object] = status_json(view, now_unix_s)
    return job_line(view.namespace, view.name, status, (), now_unix_s)


def job_headings(*, wide: bool, everywhere: bool) -> tuple[str, ...]:
    """Return the headings of a table of jobs."""
    first = ("NAMESPACE",) if everywhere else ()
    more = ("SAVED STEP", "PODS", "PENDING") if wide else ()
    return (*first, "NAME", "PHASE", "NODES", "STEP", "RATE", "ETA", "SAVED", "AGE", *more, WHY)


def pod_headings(*, wide: bool) -> tuple[str, ...]:
    """Return the headings of a table of pods."""
    more = ("ADDRESS", "VERSION") if wide else ()
    return ("POD", "STATE", "RANK", "NODE", "SPOT", "STEP", "AGE", *more, WHY)


def job_grid(jobs: Sequence[JobLine], *, wide: bool, everywhere: bool) -> Grid:
    """Return the table of jobs."""
    headings = job_headings(wide=wide, everywhere=everywhere)
    rows = tuple(job.cells(wide=wide, everywhere=everywhere) for job in jobs)
    return Grid("", headings, rows, key=headings.index("NAME"))


def pod_grid(pods: Sequence[PodLine], *, wide: bool) -> Grid:
    """Return the table of a job's pods."""
    return Grid("", pod_headings(wide=wide), tuple(pod.cells(wide=wide) for pod in pods))
