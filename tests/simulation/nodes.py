# SPDX-License-Identifier: Apache-2.0
"""One simulated pod's sidecar: the product's running parts, on what the simulation gives them.

It has no sockets: whoever would speak through one calls the part behind it. A crash loses
everything but the run directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from agent.neighbour import Dial
from agent.running import RunningParts
from agent.surroundings import MemberSettings, Sockets, Surroundings
from rdzv.keys import JobKeys
from rdzv.records.quarantine import Terms
from tests.simulation.network import Link, Sender
from tests.support.clocks.virtual import LONGEST_S, Process, SimulatedLoop
from tests.support.sidecars.jobs import identity
from tests.support.sidecars.run_dir import MemoryRunDir

KEYS = JobKeys("team", "digits")

LEASE_TTL_S = 10.0

VERSION = "0.2.0"
"""Any: a sidecar that names none is of 0.1.0, and knows one run at a time."""


@dataclass(frozen=True, slots=True)
class JobShape:
    """What all pods of the job are started with. Times in seconds."""

    least: int
    most: int
    below_min: Literal["hold", "commit"] = "hold"
    grace_s: float = 30.0
    last_call_s: float = 2.0
    on_cut: Literal["train", "hold"] = "train"
    job_uid: str = "uid-digits"
    quarantine: Terms = field(default=Terms(steps=20), repr=False)
    """Of steps that take up to two seconds, a world makes as many in less than a minute."""

    @property
    def bounds(self) -> tuple[int, int]:
        """Its min and max."""
        return self.least, self.most


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
        topology: str,
        dial: Dial | None = None,
    ) -> None:
        self.name = name
        self.pod_uid = pod_uid
        self.link = link
        self.process: Process = loop.process(f"sidecar {name}")
        self._stop = asyncio.Event()
        self._loop = loop
        clock = self._clock = _clock(loop, skew_s)
        who = identity(name, pod_uid, least=shape.least, most=shape.most)
        settings = MemberSettings(
            keys=KEYS,
            identity=replace(
                who,
                job_uid=shape.job_uid,
                version=VERSION,
                topology=topology,
                health_port=0 if dial is None else 9400,
            ),
            lease_ttl_s=LEASE_TTL_S,
            # No sidecar gives up: a kubelet would start it again.
            start_timeout_s=LONGEST_S,
            last_call_s=shape.last_call_s,
            grace_s=shape.grace_s,
            below_min=shape.below_min,
            on_cut=shape.on_cut,
            relayed=True,
            quarantine=shape.quarantine,
        )
        self._parts = RunningParts(
            Surroundings(store=link, clock=clock, boot_clock=clock, random=random, dial=dial),
            settings,
            run_dir,
            Sockets(),
            run_dir.state(pod_uid).held,
        )
        self.mirror = self._parts.client.mirror
        self.membership = self._parts.client.membership
        self.registrar = self._parts.member.registrar
        self.endpoint = self._parts.launcher.endpoint
        self.own = self._parts.launcher.drains.own
        self.shards = self._parts.launcher.desk.answer
        link.sender = lambda: Sender(name, pod_uid, self.registrar.lease_id or -1)
        self.task = loop.spawn(self.process, self._parts.run(self._stop), f"sidecar of {name}")

    @property
    def fenced(self) -> bool:
        """Whether it may not write."""
        return bool(self._parts.fenced)

    @property
    def stopping(self) -> bool:
        """Whether it leaves: its launcher has ended, and it delivers no list any more."""
        return self._stop.is_set()

    def clock(self) -> float:
        """Its own clock, in seconds."""
        return self._clock()

    def stop(self) -> None:
        """Let it leave the job and end, as SIGTERM does."""
        self._loop.call_soon(self._stop.set, context=self.process.context)


def _clock(loop: SimulatedLoop, skew_s: float) -> Callable[[], float]:
    return lambda: loop.time() + skew_s
