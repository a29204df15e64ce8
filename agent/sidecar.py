# SPDX-License-Identifier: Apache-2.0
"""The sidecar: its parts, and the root task group that keeps them going.

Every task in the group is vital: one that ends takes the sidecar down.
The exception is a fenced sidecar, which parks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from random import Random
from time import monotonic

from agent.config import Config
from agent.draining.drains import Drains
from agent.gauges import add_drain_gauges, add_gauges
from agent.host_delivery import HostDelivery
from agent.http import serving
from agent.loop_lag import LoopLag
from agent.metrics import Metrics
from agent.rundir import STATE_NAME, RunDir, State
from launcher_shim.c10d.endpoint import Endpoint
from rdzv.errors import Fenced, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.losses import Losses
from rdzv.membership import Membership
from rdzv.registrar import Registrar
from rdzv.registration import Held, Identity
from rdzv.store import Store
from rdzv.watching import Mirror, Watching

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 3.0
"""For saying goodbye to the store. Unsaid, the lease says it later."""


class Sidecar:
    """One member's parts, and the tasks that keep them going."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        state: State,
        store: Store,
        metrics: Metrics,
        random: Random,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._pod_uid = state.pod_uid
        self._fresh = state.held is None
        keys = JobKeys(config.namespace, config.job)
        self._mirror = Mirror(keys.prefix, monotonic)
        self._watching = Watching(store, self._mirror)
        membership = Membership(keys, self._mirror)
        self._registrar = Registrar(
            store,
            self._mirror,
            membership,
            identity_of(config, state.pod_uid),
            lease_ttl_s=config.lease_ttl_s,
            clock=monotonic,
            random=random,
            held=state.held,
            on_held=self._keep,
        )
        self._losses = Losses(store, self._mirror, membership, config.member)
        self._hosts = HostDelivery(
            run_dir,
            self._mirror,
            membership,
            state.held.generation if state.held else 0,
            monotonic,
            lambda: self._registrar.held.generation if self._registrar.held else None,
            nudges=config.role == "launcher",
        )
        self._endpoint = Endpoint(
            registrar=self._registrar,
            membership=membership,
            mirror=self._mirror,
            store=store,
            port=config.c10d_port or None,
            unix_path=str(run_dir.c10d_socket),
            last_call_s=config.last_call_s,
            clock=monotonic,
            random=random,
        )
        self._drains = Drains(
            run_dir,
            store,
            self._mirror,
            membership,
            self._registrar,
            self._endpoint,
            grace_s=config.grace_s,
            below_min=config.below_min,
            random=random,
        )
        self._loop_lag = LoopLag(monotonic)
        self._metrics = metrics
        self._registered_once = False
        self._fenced = ""
        self._leaving = False
        add_gauges(
            metrics, self._mirror, self._registrar, self._hosts, self._endpoint, self._loop_lag
        )
        add_drain_gauges(metrics, self._drains)

    async def run(self, stop: asyncio.Event) -> None:
        """Be a member until ``stop`` is set, then leave.

        Raises an ``ExceptionGroup`` of what took a task down; ``ConfigError`` if a port is taken.
        """
        config = self._config
        async with serving(config, self._loop_lag, self.not_ready, self._metrics):
            log.info(
                "the sidecar of %s starts %s",
                config.member,
                "as a fresh pod" if self._fresh else "again",
                extra={"event": "start", "fresh": self._fresh, "http_port": config.http_port},
            )
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_vital(name, work), name=name)
                    for name, work in (
                        ("registration", self._stay_registered()),
                        ("hosts", self._deliver_hosts()),
                        ("watching", self._watching.run()),
                        ("c10d", self._endpoint.run()),
                        ("losses", self._losses.run()),
                        ("drains", self._drains.run()),
                        ("loop-lag", self._loop_lag.run()),
                    )
                ]
                await stop.wait()
                self._leaving = True
                log.info("stopping: leaving the job", extra={"event": "stopping"})
                # The host list stays as it was: who restarts a sidecar does not change the job.
                for task in tasks[:2]:
                    task.cancel()
                await asyncio.wait(tasks[:2])
                if self._endpoint.outlived:
                    # The next sidecar of this pod goes on with it; none is missed if none comes.
                    log.info(
                        "a torchrun stays behind muster-run: leaving its place to the next sidecar",
                        extra={"event": "outlived"},
                    )
                else:
                    await self._registrar.leave(LEAVE_TIMEOUT_S)
                for task in tasks:
                    task.cancel()

    def not_ready(self) -> str | None:
        """Why launchers beside this sidecar should not start, or None."""
        if self._leaving:
            return "stopping"
        if self._fenced:
            return self._fenced
        if not self._registered_once:
            return "not registered yet"
        if self._drains.own.active:
            return "draining"
        if not self._hosts.delivered.is_set():
            return "the host list is not delivered yet"
        if not self._endpoint.listening.is_set():
            return "the rendezvous endpoint does not listen yet"
        return None

    async def _stay_registered(self) -> None:
        await self._reach_store()
        try:
            await self._registrar.run()
        except Fenced as error:
            # The launcher beside it stays as it is: its requests find nobody to write them down.
            self._fenced = str(error)
            self._endpoint.fenced = True
            log.error("fenced, this sidecar writes no more: %s", error, extra={"event": "fenced"})
            await asyncio.Event().wait()

    async def _reach_store(self) -> None:
        """Wait for the first read. One that has been a member before waits for ever."""
        timeout_s = self._config.start_timeout_s if self._fresh else None
        try:
            async with asyncio.timeout(timeout_s):
                await self._mirror.changed_after(0)
        except TimeoutError:
            raise StoreUnavailable(
                f"the store at {', '.join(self._config.etcd_endpoints)} did not answer within"
                f" {timeout_s:g} s: check --etcd-endpoints (MUSTER_ETCD_ENDPOINTS) and that it runs"
            ) from None

    async def _keep(self, held: Held) -> None:
        """Keep what is registered, for the sidecar that starts here next."""
        try:
            await asyncio.to_thread(self._run_dir.keep, State(self._pod_uid, held))
        except OSError as error:
            log.error(
                "%s cannot be written (%s): were this sidecar started again, it would be taken"
                " for a fresh pod",
                self._run_dir.path / STATE_NAME,
                error.strerror,
                extra={"event": "state_not_kept"},
            )

    async def _deliver_hosts(self) -> None:
        await self._registrar.registered.wait()
        self._registered_once = True
        await self._hosts.run()


def identity_of(config: Config, pod_uid: str) -> Identity:
    """What the configuration says this member is."""
    return Identity(
        member=config.member,
        pod_uid=pod_uid,
        address=config.address,
        node=config.node,
        role=config.role,
        slots=config.slots if config.role == "worker" else 0,
        min_workers=config.min_nodes,
        max_workers=config.max_nodes,
        job_uid=config.job_uid,
    )


async def _vital(name: str, work: Coroutine[None, None, None]) -> None:
    await work
    raise RuntimeError(f"the task {name} ended by itself")
