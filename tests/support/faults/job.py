# SPDX-License-Identifier: Apache-2.0
"""A real torchrun job on the cluster of a fault rig: three nodes, each with its sidecar."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from rdzv.store.access import Access, target_of
from tests.support.faults.link import Link
from tests.support.store.tcp_proxy import TcpProxy
from tests.support.training.background import Background
from tests.support.training.job import Job
from tests.support.training.pods import Node
from tests.support.training.step_log import World

NODES = 3
FORM_S = 180.0


class LinkedJob(Job):
    """A job whose lines to the store may be bad ones, and one member of which may start twice."""

    twin: Node | None = None

    def start_twin(self) -> None:
        """Start another pod of the name of the first node; the one that held it is fenced."""
        node = next(iter(self.nodes.values()))
        self.tell(f"another pod of the name {node.name} starts")
        self.twin = twin = self.node(node.name, 100)
        self.start_sidecar(twin)
        self.until(twin.ready, 60, "the other pod is ready")
        self.start_launcher(twin)

    def end(self) -> None:
        super().end()
        if self.twin is not None:
            self._reap(self.twin)

    def _proxy(self, endpoint: str) -> TcpProxy:
        link = Link(target_of(endpoint), Random())
        self._proxies.append(link)
        self.background.run(link.__aenter__())
        return link

    def _endpoints_of(self, node: Node) -> list[str]:
        scheme = "https://" if self.endpoints[0].startswith("https://") else ""
        return [f"{scheme}{end}" for end in map(target_of, super()._endpoints_of(node))]


@dataclass(frozen=True)
class JobEffect:
    """What a fault did to the job: worlds formed since, restarts burnt, the longest pause."""

    new_worlds: int
    ended: int
    pause_s: float

    def __str__(self) -> str:
        if self.ended:
            return f"{self.ended} torchruns ended"
        worlds = {0: "same world", 1: "1 new world"}.get(
            self.new_worlds, f"{self.new_worlds} new worlds"
        )
        return f"{worlds}, {self.pause_s:.1f} s"


class TrainingJob:
    """The job, steered from a coroutine: everything that blocks runs in a thread."""

    def __init__(self, job: LinkedJob) -> None:
        self.job = job
        self._world: World
        self._since_s = 0.0
        self._worlds = 0

    async def together(self) -> None:
        """Wait until all nodes step in one world and everybody agrees about it."""
        await asyncio.to_thread(self._come_together)

    def _come_together(self) -> None:
        self._world = self.job.world_of(self.job.nodes.values(), FORM_S)
        self.job.until(self.job.in_agreement, 60, "everybody agrees")
        self._since_s = time.monotonic()
        self._worlds = len(self.job.steps.worlds())

    async def effect(self) -> JobEffect:
        """What has happened to it since it was together; it must be so again first."""
        return await asyncio.to_thread(self._effect)

    def _effect(self) -> JobEffect:
        nodes = list(self.job.nodes.values())
        ended = sum(one.launcher is None or one.launcher.poll() is not None for one in nodes)
        if not ended:
            # The torchrun of a pod whose name is another's stays with its fenced sidecar.
            former = self._world if self.job.twin is not None else None
            self.job.world_of(nodes, FORM_S, not_=former)
        self.job.never_two_worlds()
        worlds = self.job.steps.worlds()
        steps = sorted(at_s for world in worlds for at_s in world.steps_s if at_s > self._since_s)
        moments = [self._since_s, *steps, time.monotonic()]
        pause_s = max(late - early for early, late in pairwise(moments))
        return JobEffect(len(worlds) - self._worlds, ended, pause_s)


@asynccontextmanager
async def training_job(
    directory: Path, access: Access, lease_s: float
) -> AsyncIterator[TrainingJob]:
    """Start it, and end it with all that it has started."""
    settings = {
        "MUSTER_ETCD_CACERT": access.cacert,
        "MUSTER_ETCD_USER": access.user,
        "MUSTER_ETCD_PASSWORD_FILE": access.password_file,
    }

    def begin(background: Background) -> LinkedJob:
        job = LinkedJob(
            directory,
            background,
            access,
            least=2,
            most=4,
            lease_s=lease_s,
            proxied=True,
            sidecar_environ={name: value for name, value in settings.items() if value},
        )
        try:
            job.add(NODES)
        except BaseException:
            job.end()
            raise
        return job

    background = Background()
    await asyncio.to_thread(background.__enter__)
    try:
        job = await asyncio.to_thread(begin, background)
        try:
            yield TrainingJob(job)
        finally:
            await asyncio.to_thread(job.end)
    finally:
        await asyncio.to_thread(background.__exit__, None, None, None)
