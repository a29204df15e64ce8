# SPDX-License-Identifier: Apache-2.0
"""``muster list`` and ``muster get``: jobs, each in a row, and the pods of one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial, reduce
from time import time
from typing import Any

import click

from agent.config.job import AccessConfig, JobConfig
from agent.config.table import settings_of
from agent.verdict.view import JobView
from console.completion import job_names
from console.help import Command
from console.job.job_table import JobTable, form_of
from console.job.reading import following, look, look_at_all
from console.job.rows import JobLine, job_line
from console.job.status_json import status_json
from console.options import configured_by, shown_with
from console.running import found

ANEW_S = 2.0
"""Interval at which all jobs of a store are read again: a single one is followed instead."""

IN_THE_CLUSTER = "console.remote.get:in_the_cluster"
"""The function that runs both commands in a cluster."""


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
    local = found({"job": named, "namespace": namespace}, os.environ)
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
