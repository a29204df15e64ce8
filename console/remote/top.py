# SPDX-License-Identifier: Apache-2.0
"""Scenes of a job in a cluster: what a sidecar says as it changes, and the state of the pods."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress

from console.job.top import TopScene, show_scenes
from console.remote.passing import no_job
from console.remote.pods import cluster, pods_of, with_right
from console.remote.sidecar import AGAIN_S, StatusNews, able
from console.whereabouts import ClusterOptions
from rdzv.errors import ClusterUnavailable, ConfigError

FIRST_S = 30.0
"""Time for a sidecar's first answer, after which the pods are shown without it."""


def in_the_cluster(options: ClusterOptions, job: str | None) -> None:
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
