# SPDX-License-Identifier: Apache-2.0
"""Scenes of a job in a cluster: what a sidecar says as it changes, and the state of the pods."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress

from console.job.rows import Told
from console.remote.passing import no_job
from console.remote.pods import JobPod, pods_of
from console.remote.reach import cluster
from console.remote.refusals import with_right
from console.remote.sidecar import able, ask
from console.top.command import show_scenes
from console.top.screen import TopScene
from console.whereabouts import ClusterOptions
from controller.cluster.api import ClusterApi
from rdzv.errors import ClusterUnavailable, ConfigError

ANEW_S = 2.0
"""Interval at which the pods are read again, and at which a sidecar says news at most."""

FIRST_S = 30.0
"""Time for a sidecar's first answer, after which the pods are shown without it."""

WATCHED = ("status", "--json", "--watch", "--interval", f"{ANEW_S:g}s")


def in_the_cluster(options: ClusterOptions, job: str | None) -> None:
    """Show the present command's job; raises ``ConfigError`` if none is named."""
    name = job or os.environ.get("MUSTER_JOB")
    if not name:
        raise ConfigError("no job is named: give its name; muster list shows those of a namespace")
    asyncio.run(show_scenes(scenes(options, name)))


async def scenes(options: ClusterOptions, job: str) -> AsyncIterator[TopScene]:
    """Yield the job at each change, and every ``ANEW_S``.

    Raises ``JobNotFound`` if it has no pods at first, ``ClusterRefused`` without the rights.
    """
    async with cluster(options) as api:
        with with_right("muster top", "list pods", api.namespace):
            pods = await pods_of(api, api.namespace, job)
        if not pods:
            raise await no_job(api, job)
        news = News()
        task = asyncio.create_task(_follow(api, job, news), name="status")
        try:
            if able(pods):
                await news.until(FIRST_S)
            while True:
                _raise_refusal(task)
                facts = [one.facts for one in pods]
                yield TopScene(api.namespace, job, news.told, facts, news.trouble)
                await news.until(ANEW_S)
                with suppress(ClusterUnavailable):
                    pods = await pods_of(api, api.namespace, job)
        finally:
            task.cancel()


class News:
    """The newest words of the sidecar that is asked; ``trouble``: why none says anything."""

    def __init__(self) -> None:
        self.told: Told | None = None
        self.trouble = "no sidecar runs"
        self._rest = ""
        self._came = asyncio.Event()

    def take(self, is_stderr: bool, text: str) -> None:
        """Take in a piece of a sidecar's output: whole lines are objects."""
        if is_stderr:
            return
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    self.told, self.trouble = found, ""
                    self._came.set()

    def fail(self, trouble: str) -> None:
        """Note that no sidecar answers; what was said last stays."""
        self.trouble, self._rest = trouble, ""
        self._came.set()

    async def until(self, timeout_s: float) -> None:
        """Wait for news, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._came.wait()
        self._came.clear()


async def _follow(api: ClusterApi, job: str, news: News) -> None:
    """Follow the state in one sidecar after the other; raises ``ClusterRefused``."""
    while True:
        pods: list[JobPod] = []
        try:
            pods = await pods_of(api, api.namespace, job)
            with with_right("muster top", "create pods/exec", api.namespace):
                await ask(api, pods, WATCHED, timeout_s=None, wrote=news.take)
        except ClusterUnavailable as error:
            news.fail(str(error))
        await asyncio.sleep(ANEW_S)


def _raise_refusal(task: asyncio.Task[None]) -> None:
    if task.done():
        task.result()
