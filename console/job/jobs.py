# SPDX-License-Identifier: Apache-2.0
"""``muster list``: the jobs of a store, each with its state."""

from __future__ import annotations

import asyncio
import json
import sys
from time import time

import click

from agent.config.sidecar import AccessConfig
from agent.verdict.decision import JobVerdict, verdict
from agent.verdict.states import STATES
from agent.verdict.view import JobView, view_of
from console.help import Command
from console.job.known import JOBS_MAX, jobs_in
from console.job.output import Grid, Toned, print_grids
from console.job.reading import REACH_TIMEOUT_S, unreachable
from console.options import configured_by, printed
from rdzv.counting import duration
from rdzv.errors import ConfigError, StoreRefused, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.membership import snapshot_of
from rdzv.paging import read_all
from rdzv.store import Store
from rdzv.store.open import open_store

AT_ONCE = 8
"""Jobs that are read at the same time."""


@click.command(
    "list",
    cls=Command,
    epilog="\b\nExamples:\n  muster list\n  muster list -n team-a -o json",
)
@configured_by(AccessConfig)
@click.option("-n", "--namespace", metavar="NAME", help="Show those of one namespace alone.")
@printed
def list_jobs(config: AccessConfig, namespace: str | None, as_json: bool) -> None:
    """List the jobs of the store: state, nodes, step, and the age of the last save."""
    show_jobs(config, namespace, as_json=as_json)


def show_jobs(config: AccessConfig, namespace: str | None, *, as_json: bool) -> None:
    """Print the jobs of a store, of one namespace or all."""
    views, now_unix_s = asyncio.run(_read(config, namespace)), time()
    rows = [(view, verdict(view, now_unix_s)) for view in views]
    if as_json:
        for view, found in rows:
            click.echo(json.dumps(_json(view, found)))
    elif not rows:
        where = f" in namespace {namespace}" if namespace else ""
        click.echo(
            f"the store has no job{where}; muster local -- torchrun train.py starts one here"
        )
    else:
        headings = ("NAMESPACE", "JOB", "STATE", "NODES", "STEP", "SAVED", "WHY")
        cells = tuple(_row(view, found, now_unix_s) for view, found in rows)
        print_grids([Grid("", headings, cells, key=1)], sys.stdout)


async def _read(config: AccessConfig, namespace: str | None) -> list[JobView]:
    store, turns = open_store(config.access), asyncio.Semaphore(AT_ONCE)
    try:
        known = await jobs_in(store, namespace=namespace, timeout_s=REACH_TIMEOUT_S)
        if len(known) == JOBS_MAX:
            more = f"only the first {JOBS_MAX} jobs are shown: name a namespace by -n"
            click.echo(f"muster: {more}", err=True)
        return list(await asyncio.gather(*(_view(store, keys, turns) for keys in known)))
    except StoreUnavailable as error:
        raise unreachable(config.etcd_endpoints, str(error)) from error
    except StoreRefused as error:
        raise ConfigError(
            f"the store does not let this user list its jobs ({error}): name one, as in muster"
            " status JOB"
        ) from error
    finally:
        await store.close()


async def _view(store: Store, keys: JobKeys, turns: asyncio.Semaphore) -> JobView:
    async with turns:
        read = await read_all(store, keys.prefix, timeout_s=REACH_TIMEOUT_S)
    return view_of(keys, snapshot_of(keys, read), read.kvs)


def _row(view: JobView, found: JobVerdict, now_unix_s: float) -> tuple[str, ...]:
    last, job = view.last_save, view.job
    bounds = "" if job is None else f" ({job.min_workers}-{job.max_workers})"
    step = "-" if last is None or last.seen_step is None else f"{last.seen_step:,}"
    saved = "-"
    if last is not None and last.step is None and last.seen_step is not None:
        saved = "not yet"
    elif last is not None and last.at_unix_s:
        saved = f"{duration(max(0.0, now_unix_s - last.at_unix_s))} ago"
    meaning = STATES[found.state]
    why = "" if meaning.level == "ok" else found.why
    nodes = f"{len(view.listing.listed)}{bounds}"
    state = Toned(found.state, meaning.level)
    return (view.namespace, view.name, state, nodes, step, saved, why)


def _json(view: JobView, found: JobVerdict) -> dict[str, object]:
    last, job = view.last_save, view.job
    return {
        "namespace": view.namespace,
        "job": view.name,
        **found.as_json(),
        "nodes": len(view.listing.listed),
        "min": job.min_workers if job else None,
        "max": job.max_workers if job else None,
        "last_save": None if last is None else last.as_json(),
    }
