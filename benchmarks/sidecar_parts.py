# SPDX-License-Identifier: Apache-2.0
"""Helper process: many sidecars in one event loop, each with its own parts and its own watch.

Equivalent to what ``agent.process`` builds for one pod, without signals, HTTP port and logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import muster
from agent.hosts import HostDelivery
from agent.parts import Drains, endpoint_of, job_client, launcher_parts, member_parts
from agent.process import boot_s
from agent.rundir.files import RunDir
from agent.surroundings import MemberSettings, Sockets, Surroundings
from benchmarks.worker import serve
from launcher_shim.rundir import layout
from rdzv.keys import JobKeys
from rdzv.members.registration import Identity
from rdzv.records.policy import JobPolicy
from rdzv.store import Store
from rdzv.store.etcd.client import EtcdStore

LEASE_TTL_S = 30.0
"""Long, because all sidecars of a benchmark share two cores, unlike pods."""


class TimedRunDir(RunDir):
    """A run directory that records the last delivered host list and the time of its rename."""

    def __init__(self, path: Path, on_delivered: Callable[[], None]) -> None:
        path.mkdir()
        super().__init__(str(path))
        self.delivered: tuple[str, float] = ("", 0.0)
        self._on_delivered = on_delivered

    def deliver_hosts(self, text: str) -> None:
        super().deliver_hosts(text)
        self.delivered = (text, monotonic())
        self._on_delivered()


def identity(member: str, min_nodes: int, max_nodes: int) -> Identity:
    """Build the identity of one sidecar of a benchmark."""
    return Identity(
        policy=JobPolicy(min_nodes=min_nodes, max_nodes=max_nodes),
        member=member,
        pod_uid=f"uid-{member}",
        address="127.0.0.1",
        node="",
        role="worker",
        slots=1,
        version=muster.__version__,
    )


def surroundings(store: Store, random: Random) -> Surroundings:
    """Build the surroundings of one sidecar of a benchmark."""
    return Surroundings(store=store, clock=monotonic, boot_clock=boot_s, random=random)


class Sidecar:
    """The parts of one sidecar, on a store of its own."""

    def __init__(
        self, store: Store, keys: JobKeys, who: Identity, run_dir: TimedRunDir | None
    ) -> None:
        self.store = store
        self.run_dir = run_dir
        around = surroundings(store, Random(who.member))
        settings = MemberSettings(keys=keys, identity=who, lease_ttl_s=LEASE_TTL_S)
        client = job_client(around, keys)
        member = member_parts(around, settings, client)
        self._watching = client.watching
        self.registrar = member.registrar
        self._hosts: HostDelivery | None = None
        self.drains: Drains | None = None
        if run_dir is None:
            self.endpoint = endpoint_of(around, settings, member, Sockets(c10d_port=0))
        else:
            sockets = Sockets(c10d_port=0, notice_path=run_dir.path / layout.NOTICE_SOCKET)
            launcher = launcher_parts(
                *(around, settings, member, run_dir, sockets), ready=lambda: True
            )
            self.endpoint, self.drains = launcher.endpoint, launcher.drains
            self._hosts = launcher.hosts

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watching.run())
            tasks.create_task(self.registrar.run())
            tasks.create_task(self.endpoint.run())
            if self.drains is not None:
                tasks.create_task(self.drains.run())
            if self._hosts is not None:
                await self.registrar.registered.wait()
                tasks.create_task(self._hosts.run())

    async def ready(self) -> None:
        await self.registrar.registered.wait()
        await self.endpoint.listening.wait()
        if self.drains is not None:
            await self.drains.notices.listening.wait()


class Sidecars:
    """All sidecars of this process."""

    def __init__(self) -> None:
        self._sidecars: list[Sidecar] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._renamed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def start(
        self,
        endpoint: str,
        job: str,
        members: Sequence[str],
        min_nodes: int,
        max_nodes: int,
        run_dirs: str | None,
    ) -> list[int | None]:
        """Start one sidecar for each member, and wait until all are registered."""
        keys = JobKeys("bench", job)
        for member in members:
            run_dir = None
            if run_dirs is not None:
                run_dir = TimedRunDir(Path(run_dirs, member), self._note_renamed)
            sidecar = Sidecar(
                EtcdStore([endpoint]), keys, identity(member, min_nodes, max_nodes), run_dir
            )
            self._sidecars.append(sidecar)
            self._tasks.append(asyncio.create_task(sidecar.run(), name=member))
        ready = asyncio.create_task(self._all_ready())
        await asyncio.wait([ready, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()
        return [sidecar.endpoint.port for sidecar in self._sidecars]

    async def delivered(self, member: str, *, present: bool) -> list[float]:
        """Wait until every host list names ``member``, or none; return when each was renamed."""
        wanted = f"{member}."
        run_dirs = [sidecar.run_dir for sidecar in self._sidecars if sidecar.run_dir]
        while not all((wanted in run_dir.delivered[0]) is present for run_dir in run_dirs):
            self._renamed.clear()
            await self._renamed.wait()
        return [run_dir.delivered[1] for run_dir in run_dirs]

    def _note_renamed(self) -> None:
        # Host lists are renamed in other threads.
        self._loop.call_soon_threadsafe(self._renamed.set)

    async def _all_ready(self) -> None:
        for sidecar in self._sidecars:
            await sidecar.ready()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sidecar in self._sidecars:
            await sidecar.store.close()
        self._sidecars, self._tasks = [], []

    async def obey(self, order: dict[str, Any]) -> Any:
        match order.pop("do"):
            case "start":
                return await self.start(**order)
            case "delivered":
                return await self.delivered(**order)
            case "stop":
                return await self.stop()
        raise ValueError(f"no such order: {order}")


async def main() -> None:
    sidecars = Sidecars()
    await serve(sidecars.obey)
    await sidecars.stop()


if __name__ == "__main__":
    asyncio.run(main())
