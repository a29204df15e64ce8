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
from agent.gauges import add_drain_gauges, add_gauges, add_launcher_gauge
from agent.http import serving
from agent.loop_lag import LoopLag
from agent.metrics import Metrics
from agent.parts import job_parts, launcher_parts
from agent.rundir import STATE_NAME, RunDir, State
from rdzv.errors import Fenced, StoreUnavailable
from rdzv.registration import Held
from rdzv.store import Store

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
        self._job = job_parts(config, state, store, random, on_held=self._keep)
        self._launcher = launcher_parts(
            config, run_dir, state, store, self._job, random, ready=lambda: not self.not_ready()
        )
        self._loop_lag = LoopLag(monotonic)
        self._metrics = metrics
        self._registered_once = False
        self._fenced = ""
        self._leaving = False
        add_gauges(
            metrics,
            self._job.mirror,
            self._job.registrar,
            self._launcher.hosts,
            self._launcher.endpoint,
            self._loop_lag,
        )
        add_drain_gauges(metrics, self._launcher.drains)
        add_launcher_gauge(metrics, self._launcher.lookout)

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
                        ("watching", self._job.watching.run()),
                        ("c10d", self._launcher.endpoint.run()),
                        ("losses", self._job.losses.run()),
                        ("drains", self._launcher.drains.run()),
                        ("lookout", self._launcher.lookout.run()),
                        ("sweeper", self._job.sweeper.run()),
                        ("store-version", self._job.store_version.run()),
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
                if self._launcher.endpoint.outlived:
                    # The next sidecar of this pod goes on with it; none is missed if none comes.
                    log.info(
                        "a torchrun stays behind muster-run: leaving its place to the next sidecar",
                        extra={"event": "outlived"},
                    )
                else:
                    await self._job.registrar.leave(LEAVE_TIMEOUT_S)
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
        if self._launcher.drains.own.active:
            return "draining"
        if not self._launcher.hosts.delivered.is_set():
            return "the host list is not delivered yet"
        if not self._launcher.endpoint.listening.is_set():
            return "the rendezvous endpoint does not listen yet"
        return None

    async def _stay_registered(self) -> None:
        await self._reach_store()
        while True:
            try:
                await self._job.registrar.run()
            except Fenced as error:
                # The launcher beside it stays as it is: nobody writes its requests down.
                self._fenced = str(error)
                self._launcher.endpoint.fenced = True
                log.error(
                    "fenced, this sidecar writes no more: %s", error, extra={"event": "fenced"}
                )
            await self._job.registrar.let_in_again()
            self._fenced = ""
            self._launcher.endpoint.fenced = False
            log.info(
                "no longer fenced: the job is this pod's again", extra={"event": "fence_lifted"}
            )

    async def _reach_store(self) -> None:
        """Wait for the first read. One that has been a member before waits for ever."""
        timeout_s = self._config.start_timeout_s if self._fresh else None
        try:
            async with asyncio.timeout(timeout_s):
                await self._job.mirror.changed_after(0)
        except TimeoutError:
            trouble = self._job.watching.trouble
            raise StoreUnavailable(
                f"the store at {', '.join(self._config.etcd_endpoints)} could not be read within"
                f" {timeout_s:g} s{f' ({trouble})' if trouble else ''}: check --etcd-endpoints"
                " (MUSTER_ETCD_ENDPOINTS), that it runs, and that it lets this member in"
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
        await self._job.registrar.registered.wait()
        self._registered_once = True
        await self._launcher.hosts.run()


async def _vital(name: str, work: Coroutine[None, None, None]) -> None:
    await work
    raise RuntimeError(f"the task {name} ended by itself")
