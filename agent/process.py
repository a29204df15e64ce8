# SPDX-License-Identifier: Apache-2.0
"""The sidecar's process: one root task group, its signals and its exit status.

Every task in the group is vital: one that ends takes the process down, and the status says why.
The exceptions are a signal, which lets the sidecar leave, and a fenced sidecar, which parks.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from random import Random, SystemRandom
from time import monotonic

from agent.config import Config
from agent.counted_store import CountedStore
from agent.host_delivery import HostDelivery
from agent.http import serving
from agent.loop_lag import LoopLag
from agent.metrics import Metrics
from agent.rundir import STATE_NAME, RunDir, State
from launcher_shim.c10d.endpoint import Endpoint
from rdzv.errors import ConfigError, Fenced, JobMismatch, MusterError, StoreError, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.losses import Losses
from rdzv.membership import Membership
from rdzv.registrar import Registrar
from rdzv.registration import Held, Identity
from rdzv.store import Store
from rdzv.store.etcd import EtcdStore
from rdzv.watching import Mirror, Watching

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 3.0
"""For saying goodbye to the store. Unsaid, the lease says it later."""

STATUS_DONE = 0
STATUS_USAGE = 2
STATUS_UNAVAILABLE = 69
STATUS_DEFECT = 70


async def run(config: Config) -> int:
    """Run the sidecar until a signal ends it; return the process's exit status."""
    metrics = Metrics()
    random = SystemRandom()
    try:
        run_dir = RunDir(config.run_dir)
        await asyncio.to_thread(run_dir.deliver, config)
        state = await asyncio.to_thread(run_dir.state, config.pod_uid)
        first = random.randrange(len(config.etcd_endpoints))
        store = CountedStore(
            EtcdStore(config.etcd_endpoints, first=first),
            lambda kind: metrics.store_errors.labels(kind).inc(),
        )
        try:
            with _stop_signals() as stop:
                await Sidecar(config, run_dir, state, store, metrics, random).run(stop)
        finally:
            await store.close()
    except (MusterError, ExceptionGroup) as error:
        return _report(error)
    log.info("%s has left", config.member, extra={"event": "stopped"})
    return STATUS_DONE


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
        self._keys = JobKeys(config.namespace, config.job)
        self._mirror = Mirror(self._keys.prefix, monotonic)
        self._watching = Watching(store, self._mirror)
        membership = Membership(self._keys, self._mirror)
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
        self._loop_lag = LoopLag(monotonic)
        self._metrics = metrics
        self._registered_once = False
        self._fenced = ""
        self._leaving = False
        self._add_gauges()

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

    def _add_gauges(self) -> None:
        gauge, mirror, registrar = self._metrics.gauge, self._mirror, self._registrar
        gauge("muster_members", "Members of the job, by state.", self._members, "state")
        gauge(
            "muster_registered",
            "1 while this member is registered.",
            lambda: float(registrar.registered.is_set()),
        )
        gauge(
            "muster_lease_remaining_seconds",
            "How long this member's lease lives without another renewal.",
            lambda: max(0.0, registrar.lease_valid_until_s - monotonic()),
        )
        gauge(
            "muster_generation",
            "The life of the job this member is in; 0 before it registered.",
            lambda: float(registrar.generation or 0),
        )
        gauge(
            "muster_store_revision",
            "Revision of the store that this member has seen.",
            lambda: float(mirror.revision),
        )
        gauge(
            "muster_watch_healthy_seconds",
            "For how long the watch of the store has worked without a gap; 0 while it does not.",
            lambda: mirror.healthy_for_s(monotonic()),
        )
        gauge(
            "muster_c10d_connections",
            "Launchers connected to the rendezvous endpoint.",
            lambda: float(self._endpoint.connections),
        )
        gauge(
            "muster_round",
            "Number of the newest round of each torch run.",
            self._rounds,
            "run_id",
        )
        gauge(
            "muster_loop_lag_seconds",
            "The worst lag of the event loop in the last ten seconds.",
            lambda: self._loop_lag.worst_s,
        )

    def _rounds(self) -> dict[str, float]:
        runs = self._endpoint.rendezvous().items()
        return {run_id: float(run.snapshot().round.number) for run_id, run in runs}

    def _members(self) -> dict[str, float]:
        listing = self._hosts.listing
        return {
            "listed": len(listing.listed),
            "standby": len(listing.standby),
            "excluded": len(listing.excluded),
        }


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


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _report(error: BaseException) -> int:
    """Log why the process ends, one line a cause; return the exit status."""
    if isinstance(error, ExceptionGroup):
        return max(_report(cause) for cause in error.exceptions)
    if isinstance(error, ConfigError | JobMismatch):
        log.error("%s", error, extra={"event": "misconfigured"})
        return STATUS_USAGE
    if isinstance(error, StoreError):
        log.error("%s", error, extra={"event": "store_unavailable"})
        return STATUS_UNAVAILABLE
    log.critical("a defect of muster: %s", error, exc_info=error, extra={"event": "defect"})
    return STATUS_DEFECT
