# SPDX-License-Identifier: Apache-2.0
"""``muster list`` and ``muster get`` of a cluster: pods, and what a sidecar of each job says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import time
from typing import Any

import click

from agent.config.parsers import duration_s
from console.job.job_table import JobTable, form_of
from console.job.rows import JobLine, Told, job_line
from console.remote.passing import no_job
from console.remote.pods import JobPod, jobs_in, pods_of
from console.remote.reach import cluster
from console.remote.refusals import FORBIDDEN, forbidden, with_right
from console.remote.sidecar import able, ask
from console.whereabouts import ClusterOptions
from controller.cluster.api import ClusterApi
from injection.job_label import job_label
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable

AT_ONCE = 8
"""Sidecars that are asked at the same time."""

ANSWER_S = 60.0
"""Timeout of one sidecar's answer."""

ANEW_S = 2.0
"""Interval at which the pods are read again, and at which a sidecar says news at most."""

Key = tuple[str, str]
"""Namespace and job, as pods are labelled."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The jobs to show: one, those of a namespace, or (``namespace`` None) of all."""

    namespace: str | None
    job: str | None = None


def in_the_cluster(options: ClusterOptions, _job: str | None) -> None:
    """Show what the present command, ``list`` or ``get``, asks for."""
    params = click.get_current_context().params
    form = params["form"]
    table = JobTable(
        form_of(
            as_json=params["as_json"] or form == "json",
            as_yaml=form == "yaml",
            wide=params["wide"] or form == "wide",
        )
    )
    interval_s = duration_s(0.1, 3600)(params["interval"]) if params["interval"] else ANEW_S
    asyncio.run(
        _show(
            options,
            params.get("named"),
            table,
            everywhere=params["everywhere"],
            interval_s=interval_s if params["watch"] else None,
        )
    )


async def _show(
    options: ClusterOptions,
    job: str | None,
    table: JobTable,
    *,
    everywhere: bool,
    interval_s: float | None,
) -> None:
    async with cluster(options) as api:
        namespace = None if everywhere and job is None else api.namespace
        scope = Scope(namespace, job)
        where = "the cluster" if namespace is None else f"namespace {namespace}"
        none = f"{where} has no job with a sidecar"
        table = JobTable(table.form, one=job is not None, everywhere=namespace is None, none=none)
        if interval_s is not None:
            await table.follow(_states(api, scope, interval_s))
            return
        jobs = await _jobs(api, scope)
        if job is not None and not jobs:
            raise await no_job(api, job)
        turns = asyncio.Semaphore(AT_ONCE)
        asked = (_asked(api, key, pods, turns) for key, pods in sorted(jobs.items()))
        table.show(await asyncio.gather(*asked))


async def _jobs(api: ClusterApi, scope: Scope) -> dict[Key, list[JobPod]]:
    with with_right(_command(), "list pods", scope.namespace):
        if scope.job is None:
            return await jobs_in(api, scope.namespace)
        assert scope.namespace is not None
        pods = await pods_of(api, scope.namespace, scope.job)
        return {(scope.namespace, job_label(scope.job)): pods} if pods else {}


async def _asked(
    api: ClusterApi, key: Key, pods: Sequence[JobPod], turns: asyncio.Semaphore
) -> JobLine:
    """Return the row of a job, by what one of its sidecars says now."""
    told, trouble = None, ""
    if able(pods):
        async with turns:
            try:
                ran = await ask(api, pods, ["status", "--json"], timeout_s=ANSWER_S)
                told, trouble = parsed(ran.out), _first_line(ran.err)
            except ClusterError as error:
                trouble = _sentence(error, key[0])
    return _line(key, pods, told, trouble)


def _line(key: Key, pods: Sequence[JobPod], told: Told | None, trouble: str) -> JobLine:
    facts = [one.facts for one in pods]
    return job_line(*key, told, facts, time(), trouble=trouble or "no sidecar runs")


def parsed(text: str) -> dict[str, Any] | None:
    """Return the object of the last whole line of ``text``; None without one."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None


def _sentence(error: ClusterError, namespace: str) -> str:
    if isinstance(error, ClusterRefused) and error.status == FORBIDDEN:
        return forbidden(_command(), "create pods/exec", namespace, str(error))
    return str(error)


def _command() -> str:
    ctx = click.get_current_context(silent=True)
    return f"muster {ctx.command.name if ctx is not None else 'get'}"


def _first_line(text: str) -> str:
    """Return what an error says before it explains itself."""
    return text.strip().partition("\n")[0].removeprefix("muster: ")


@dataclass(slots=True)
class _News:
    """The news of one job, from a sidecar that is followed."""

    pods: list[JobPod]
    told: Told | None = None
    trouble: str = ""
    rest: str = field(default="", repr=False)


async def _states(
    api: ClusterApi, scope: Scope, interval_s: float
) -> AsyncIterator[Sequence[JobLine]]:
    """Yield the rows at each change: pods are listed again, and a sidecar of each job is heard."""
    jobs: dict[Key, _News] = {}
    hearers: dict[Key, asyncio.Task[None]] = {}
    changed = asyncio.Event()
    try:
        while True:
            try:
                found = await _jobs(api, scope)
            except ClusterUnavailable:
                found = {key: one.pods for key, one in jobs.items()}
            for key, pods in found.items():
                jobs.setdefault(key, _News(pods)).pods = pods
                if key not in hearers:
                    hearing = _hear(api, key, jobs[key], interval_s, changed)
                    hearers[key] = asyncio.create_task(hearing, name=f"hear {key[1]}")
            for key in jobs.keys() - found.keys():
                del jobs[key]
                hearers.pop(key).cancel()
            changed.clear()
            yield [_line(key, one.pods, one.told, one.trouble) for key, one in sorted(jobs.items())]
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await changed.wait()
    finally:
        for hearer in hearers.values():
            hearer.cancel()
        await asyncio.gather(*hearers.values(), return_exceptions=True)


async def _hear(
    api: ClusterApi, key: Key, job: _News, interval_s: float, changed: asyncio.Event
) -> None:
    """Keep ``job.told`` up to date by a sidecar of it; by the next one, when that one goes."""

    def wrote(is_stderr: bool, text: str) -> None:
        if is_stderr:
            job.trouble = _first_line(text)
            return
        *lines, job.rest = (job.rest + text).split("\n")
        if (told := parsed("\n".join(lines))) is not None:
            job.told, job.trouble = told, ""
            changed.set()

    words = ["status", "--json", "--watch", "--interval", f"{interval_s:g}s"]
    while True:
        job.rest = ""
        if able(job.pods):
            try:
                await ask(api, job.pods, words, timeout_s=None, wrote=wrote)
            except ClusterError as error:
                job.trouble = _sentence(error, key[0])
        else:
            job.told = None
        changed.set()
        await asyncio.sleep(ANEW_S)
