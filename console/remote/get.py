# SPDX-License-Identifier: Apache-2.0
"""``muster list``, ``get`` and ``top`` in a cluster: pods, and what a sidecar of each job says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import time

import click

from console.job.jobs import JobTable, form_of
from console.job.rows import UNREADABLE, JobLine, StatusObject, job_line
from console.job.top import TopScene, show_scenes
from console.remote.passing import no_job
from console.remote.pods import JobPod, cluster, jobs_in, pods_of, with_right
from console.remote.sidecar import (
    AGAIN_S,
    StatusNews,
    able,
    ask,
    first_line,
    last_object,
    sentence,
)
from console.whereabouts import ClusterOptions
from controller.cluster.api import ClusterApi
from injection.kinds import job_label
from rdzv.errors import ClusterError, ClusterUnavailable, ConfigError
from rdzv.settings import duration_s

AT_ONCE = 8
"""Sidecars that are asked at the same time."""

ANSWER_S = 60.0
"""Timeout of one sidecar's answer."""

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
    interval_s = duration_s(0.1, 3600)(params["interval"]) if params["interval"] else AGAIN_S
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


async def _jobs(api: ClusterApi, scope: Scope) -> Mapping[Key, Sequence[JobPod]]:
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
    status, trouble = None, "no sidecar runs"
    if able(pods):
        async with turns:
            try:
                ran = await ask(api, pods, ["status", "--json"], timeout_s=ANSWER_S)
                status = last_object(ran.out)
                trouble = "" if status else first_line(ran.err) or UNREADABLE
            except ClusterError as error:
                trouble = sentence(error, _command(), key[0])
    return _line(key, pods, status, trouble)


def _line(key: Key, pods: Sequence[JobPod], status: StatusObject | None, trouble: str) -> JobLine:
    return job_line(*key, status, [one.facts for one in pods], time(), trouble=trouble)


def _command() -> str:
    ctx = click.get_current_context(silent=True)
    return f"muster {ctx.command.name if ctx is not None else 'get'}"


async def _states(
    api: ClusterApi, scope: Scope, interval_s: float
) -> AsyncIterator[Sequence[JobLine]]:
    """Yield the rows at each change: pods are listed again, and a sidecar of each job is heard."""
    jobs: dict[Key, StatusNews] = {}
    followers: dict[Key, asyncio.Task[None]] = {}
    changed, command = asyncio.Event(), _command()
    try:
        while True:
            away = ""
            try:
                found = await _jobs(api, scope)
            except ClusterUnavailable as error:
                found, away = {key: one.pods for key, one in jobs.items()}, str(error)
            for key, pods in found.items():
                jobs.setdefault(key, StatusNews(pods, changed)).pods = pods
                if key not in followers:
                    following = jobs[key].follow(api, command, interval_s)
                    followers[key] = asyncio.create_task(following, name=f"status of {key[1]}")
            for key in jobs.keys() - found.keys():
                del jobs[key]
                followers.pop(key).cancel()
            for one in followers.values():
                if one.done():
                    one.result()  # a bug: its row would stand still
            changed.clear()
            yield [
                _line(key, one.pods, one.status, away or one.trouble)
                for key, one in sorted(jobs.items(), key=lambda job: job[0])
            ]
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await changed.wait()
    finally:
        for one in followers.values():
            one.cancel()
        await asyncio.gather(*followers.values(), return_exceptions=True)


FIRST_S = 30.0
"""Time for a sidecar's first answer, after which the pods are shown without it."""


def top_in_the_cluster(options: ClusterOptions, job: str | None) -> None:
    """Show the present command's job; raises ``ConfigError`` if none is named."""
    name = job or os.environ.get("MUSTER_JOB")
    if not name:
        raise ConfigError("no job is named: give its name; muster list shows those of a namespace")
    asyncio.run(show_scenes(scenes(options, name)))


async def scenes(options: ClusterOptions, job: str) -> AsyncIterator[TopScene]:
    """Yield the job at each change, and every ``AGAIN_S``.

    Raises ``JobNotFound`` if it has no pods at first, ``ClusterRefused`` if they may not be listed.
    """
    async with cluster(options) as api:
        with with_right("muster top", "list pods", api.namespace):
            pods = await pods_of(api, api.namespace, job)
        if not pods:
            raise await no_job(api, job)
        news, away = StatusNews(pods), ""
        task = asyncio.create_task(news.follow(api, "muster top", AGAIN_S), name="status")
        try:
            if able(pods):
                await _until_changed(news, FIRST_S)
            while True:
                if task.done():
                    task.result()  # a bug: the screen would stand still
                facts = [one.facts for one in news.pods]
                yield TopScene(api.namespace, job, news.status, facts, away or news.trouble)
                await _until_changed(news, AGAIN_S)
                try:
                    news.pods, away = await pods_of(api, api.namespace, job), ""
                except ClusterUnavailable as error:
                    away = str(error)
        finally:
            task.cancel()


async def _until_changed(news: StatusNews, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await news.changed.wait()
    news.changed.clear()
