# SPDX-License-Identifier: Apache-2.0
"""One simulated pod's sidecar: the production parts, put together as ``agent.sidecar`` does.

Left out are its sockets, its HTTP server and its logs: whoever would speak through a socket calls
the part behind it. A crash loses everything but the run directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from agent.draining.gatekeeper import Gatekeeper
from agent.draining.own_drain import OwnDrain
from agent.draining.sight import Sight
from agent.draining.steward import Steward
from agent.draining.writing import Writing
from agent.host_delivery import HostDelivery
from agent.rundir import State
from agent.running import LEAVE_TIMEOUT_S
from launcher_shim.c10d.endpoint import Endpoint
from rdzv.errors import Fenced
from rdzv.keys import JobKeys
from rdzv.live_round import Policy
from rdzv.losses import Losses
from rdzv.membership import Membership
from rdzv.registrar import Registrar
from rdzv.registration import Held, Identity
from rdzv.watching import Mirror, Watching
from tests.chaos.simulation.loop import Process, SimulatedLoop
from tests.chaos.simulation.network import Link, Sender
from tests.chaos.simulation.run_dir import MemoryRunDir

KEYS = JobKeys("team", "digits")

LEASE_TTL_S = 10.0


@dataclass(frozen=True, slots=True)
class JobShape:
    """What all pods of the job are started with. Times in seconds."""

    least: int
    most: int
    below_min: Literal["hold", "commit"] = "hold"
    grace_s: float = 30.0
    last_call_s: float = 2.0
    job_uid: str = "uid-digits"


class Sidecar:
    """One life of one sidecar. ``skew_s`` sets its clock apart from the others'."""

    def __init__(
        self,
        loop: SimulatedLoop,
        link: Link,
        name: str,
        pod_uid: str,
        run_dir: MemoryRunDir,
        shape: JobShape,
        random: Random,
        skew_s: float,
    ) -> None:
        self.name = name
        self.pod_uid = pod_uid
        self.link = link
        self.process: Process = loop.process(f"sidecar {name}")
        self.fenced = False
        self._stop = asyncio.Event()
        self._loop = loop
        clock = self._clock = _clock(loop, skew_s)
        state = run_dir.state(pod_uid)
        self._run_dir = run_dir
        mirror = self.mirror = Mirror(KEYS.prefix, clock)
        self._watching = Watching(link, mirror)
        membership = self.membership = Membership(KEYS, mirror)
        identity = Identity(
            name,
            pod_uid,
            "127.0.0.1",
            "host",
            "worker",
            1,
            shape.least,
            shape.most,
            job_uid=shape.job_uid,
        )
        self.registrar = Registrar(
            link,
            mirror,
            membership,
            identity,
            lease_ttl_s=LEASE_TTL_S,
            clock=clock,
            random=random,
            held=state.held,
            on_held=self._keep,
        )
        self._losses = Losses(link, mirror, membership, name)
        self._hosts = HostDelivery(
            run_dir,
            mirror,
            membership,
            state.held.generation if state.held else 0,
            clock,
            lambda: self.registrar.held.generation if self.registrar.held else None,
        )
        self.endpoint = Endpoint(
            registrar=self.registrar,
            membership=membership,
            mirror=mirror,
            store=link,
            port=None,
            unix_path=None,
            last_call_s=shape.last_call_s,
            clock=clock,
            random=random,
        )
        writing = Writing(link, mirror, self.registrar, random)
        sight = Sight(membership, self.endpoint, pod_uid, run_dir.path)
        policy = Policy(shape.below_min)
        self.own = OwnDrain(run_dir, membership, writing, grace_s=shape.grace_s, boot_s=clock)
        self.gatekeeper = Gatekeeper(run_dir, sight, mirror, writing, self.own, policy, clock)
        self._steward = Steward(
            sight, writing, self.own, policy, clock=clock, boot_s=clock, random=random
        )
        link.sender = lambda: Sender(name, pod_uid, self.registrar.lease_id or -1)
        self.task = loop.spawn(self.process, self._run(), f"sidecar of {name}")

    @property
    def stopping(self) -> bool:
        """Whether it leaves: its launcher has ended, and it delivers no list any more."""
        return self._stop.is_set()

    def clock(self) -> float:
        """Its own clock, in seconds."""
        return self._clock()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(work, name=name)
                for name, work in (
                    ("registration", self._stay_registered()),
                    ("hosts", self._deliver_hosts()),
                    ("watching", self._watching.run()),
                    ("c10d", self.endpoint.run()),
                    ("losses", self._losses.run()),
                    ("drains", self._drain()),
                )
            ]
            await self._stop.wait()
            for task in tasks[:2]:
                task.cancel()
            await asyncio.wait(tasks[:2])
            await self.registrar.leave(LEAVE_TIMEOUT_S)
            for task in tasks:
                task.cancel()

    def stop(self) -> None:
        """Let it leave the job and end, as SIGTERM does."""
        self._loop.call_soon(self._stop.set, context=self.process.context)

    async def _stay_registered(self) -> None:
        await self.mirror.changed_after(0)
        while True:
            try:
                await self.registrar.run()
            except Fenced:
                self.fenced = self.endpoint.fenced = True
            await self.registrar.let_in_again()
            self.fenced = self.endpoint.fenced = False

    async def _deliver_hosts(self) -> None:
        await self.registrar.registered.wait()
        await self._hosts.run()

    async def _drain(self) -> None:
        self.own.restore()
        self.gatekeeper.restore()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.own.run(), name="own-drain")
            await self.mirror.changed_after(0)
            tasks.create_task(self._steward.run(), name="steward")
            tasks.create_task(self.gatekeeper.run(), name="gatekeeper")

    async def _keep(self, held: Held) -> None:
        await asyncio.to_thread(self._run_dir.keep, State(self.pod_uid, held))


def _clock(loop: SimulatedLoop, skew_s: float) -> Callable[[], float]:
    return lambda: loop.time() + skew_s
