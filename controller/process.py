# SPDX-License-Identifier: Apache-2.0
"""The controller's process: its HTTPS port, components, signals and exit status.

Status: 0 if stopped, 2 for configuration, 70 for a defect. An unavailable API server ends nothing:
the controller goes on serving what it knows.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any

from aiohttp import web

from controller.access.reconciler import StoreAccess, store_access
from controller.admission.evictor import Evictor
from controller.admission.injector import AdmissionMetrics, Injector
from controller.admission.uninjected import UninjectedPods
from controller.certificate_keeper import CertificateKeeper
from controller.cluster import paths
from controller.cluster.access import access_of_pod
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from controller.cluster.events import Events
from controller.config import ControllerConfig, Network
from controller.job_events import EventReporter
from controller.jobs import Jobs
from controller.leadership import Leadership
from controller.metrics import Backups, SeenMetrics
from controller.notice_executor import NoticeExecutor
from controller.notices import NoticePolicy, node_seen
from controller.owner_reconciler import OwnerReconciler, UnplacedWriter
from controller.owners import Owners, pod_seen
from controller.page import serving_page
from rdzv.errors import ConfigError, MusterError
from rdzv.reconcile import DEFECT_PAUSE_S, errors_in, log_pause, restarted
from rdzv.sentences import named
from rdzv.store.access import Access
from rdzv.store.etcd.client import open_store

log = logging.getLogger(__name__)

REVIEW_MAX_BYTES = 4 * 2**20
"""Limit on a request; the API server takes objects of 3 MiB at most, and sends a pod once."""
LAST_ANSWERS_S = 10.0
"""Timeout for the requests in progress when the controller is stopped."""

REFUSED_AGAIN_S = 60.0
"""Minimum interval between two log lines about refused callers, who may call at any rate."""

LEAVE_S = 5.0
"""Time for which the webhook still answers after a stop signal: the API server goes on asking
until it learns that this replica stops, and a pod that gets no answer starts without Muster."""

SWITCH_S = 0.0005
"""Time after which a thread that plans a pod yields the interpreter to the event loop. An answer by
TLS needs it a dozen times: by Python's default of 5 ms, ``/readyz`` waits for the whole plan."""


@dataclass(slots=True)
class Callers:
    """The rule by which callers may send reviews; any caller may if nothing is known of the server.

    ``networks``: the addresses of the API server; empty for any. ``certificate``: whether it has a
    client certificate, which the TLS context has checked.
    """

    networks: tuple[Network, ...] = ()
    certificate: bool = False
    _told_s: float = -REFUSED_AGAIN_S

    def fault(self, address: str, *, has_certificate: bool) -> str:
        """Return why a caller is refused; empty if it is not."""
        found = ipaddress.ip_address(address.partition("%")[0])
        found = getattr(found, "ipv4_mapped", None) or found
        if self.networks and not any(found in network for network in self.networks):
            return f"{found} is no address of the API server ({named('--api-server-cidrs')})"
        if self.certificate and not has_certificate:
            return f"{found} has shown no client certificate ({named('--api-server-ca')})"
        return ""

    def admit(self, request: web.Request) -> None:
        """Raise ``HTTPForbidden`` for a caller that is not the API server, and log it."""
        transport = request.transport
        peer = transport and transport.get_extra_info("peername")
        shown = transport and transport.get_extra_info("peercert")
        fault = self.fault(peer[0], has_certificate=bool(shown)) if peer else "it has hung up"
        if not fault:
            return
        if time.monotonic() - self._told_s >= REFUSED_AGAIN_S:
            self._told_s = time.monotonic()
            log.warning(
                "refused a review: %s; pods start without Muster if the API server sent it",
                fault,
                extra={"event": "review_refused"},
            )
        raise web.HTTPForbidden(text=f"{fault}\n")


def ask_for_certificates(context: ssl.SSLContext, authority: str) -> None:
    """Ask clients for a certificate of this authority; raises ``ConfigError`` if it is no file.

    A client may have none: the kubelet and a Prometheus call all paths but ``/inject``.
    """
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError(
            f"{named('--api-server-ca')}: cannot load {authority} ({error}): name a file in PEM"
        ) from error
    context.verify_mode = ssl.CERT_OPTIONAL


def application(
    injector: Injector,
    metrics: AdmissionMetrics,
    ready: asyncio.Event,
    callers: Callers | None = None,
) -> web.Application:
    """Build the application that serves ``/inject``, ``/healthz``, ``/readyz`` and ``/metrics``.

    ``callers`` are those of ``/inject``; the kubelet and a Prometheus call the other paths.
    """
    callers = callers or Callers()

    async def inject(request: web.Request) -> web.Response:
        callers.admit(request)
        try:
            answer = await injector.answer(await request.read())
        except ConfigError as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(body=answer, content_type="application/json")

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="healthy\n")

    async def readyz(request: web.Request) -> web.Response:
        if not ready.is_set():
            return web.Response(status=503, text="the API server does not trust it yet\n")
        return web.Response(text="ready\n")

    async def metricsz(request: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain"})

    pages = web.Application(client_max_size=REVIEW_MAX_BYTES)
    pages.router.add_post("/inject", inject)
    pages.router.add_get("/healthz", healthz)
    pages.router.add_get("/readyz", readyz)
    pages.router.add_get("/metrics", metricsz)
    return pages


@asynccontextmanager
async def serving(
    pages: web.Application, address: str, port: int, context: ssl.SSLContext
) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port. Raises ``ConfigError`` if it cannot be bound."""
    runner = web.AppRunner(pages, access_log=None, shutdown_timeout=LAST_ANSWERS_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address, port, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"{named('--port')}: {port} of {address} cannot be had ({error.strerror}): give"
                " another"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def keep_following(
    config: ControllerConfig,
    api: ClusterApi,
    access: Access,
    seen: SeenMetrics,
    evictor: Evictor | None = None,
) -> None:
    """Follow all jobs until cancelled; report a failure and retry, so that the webhook goes on."""
    while True:
        try:
            await follow(config, api, access, seen, evictor)
        except* MusterError as group:
            for error in errors_in(group):
                log.error(
                    "cannot follow jobs, retrying: %s", error, extra={"event": "not_following"}
                )
        except* Exception as group:
            for error in errors_in(group):
                log_pause("following jobs", error)
        await asyncio.sleep(DEFECT_PAUSE_S)


async def follow(
    config: ControllerConfig,
    api: ClusterApi,
    access: Access,
    seen: SeenMetrics,
    evictor: Evictor | None,
) -> None:
    """Follow all jobs of a store until cancelled; write only while this replica leads."""
    clock, random, me = time.monotonic, Random(), socket.gethostname()
    store = open_store(access, random=random)
    try:
        async with AsyncExitStack() as stack:
            jobs = await stack.enter_async_context(Jobs(store, clock, random).following())
            if config.page_port:
                await stack.enter_async_context(serving_page(jobs, config.page_port))
            pods = await stack.enter_async_context(
                Collection(api, paths.PODS_OF_JOBS, pod_seen).following()
            )
            seen.jobs, seen.pods = jobs, pods
            nodes = Collection(api, paths.NODES, node_seen)
            notices = config.notices == "on"
            if notices:
                await stack.enter_async_context(nodes.following())
            owners = Owners(api, pods, clock)
            lease = paths.lease(config.own_namespace, config.lease)
            leadership = Leadership(api, lease, me, clock)

            async def lead() -> None:
                await pods.changed_after(0)
                async with asyncio.TaskGroup() as tasks:
                    if evictor is not None:
                        evicting = restarted("evicting pods without a sidecar", evictor.run)
                        tasks.create_task(evicting)
                    if config.events == "on":
                        reporter = EventReporter(jobs, owners, Events(api, clock), leadership)
                        tasks.create_task(restarted("publishing Events", reporter.run))
                    if "on" in (config.desired, config.annotations):
                        reconciler = OwnerReconciler(
                            api,
                            jobs,
                            owners,
                            clock,
                            scales=config.desired == "on",
                            annotates=config.annotations == "on",
                        )
                        tasks.create_task(restarted("reconciling owners", reconciler.run))
                    if config.desired == "on":
                        writer = UnplacedWriter(jobs, pods)
                        tasks.create_task(restarted("counting pods without a node", writer.run))
                    if notices:
                        policy = NoticePolicy(
                            config.notice_taints,
                            config.notice_conditions,
                            config.notice_cordon == "on",
                            config.notice_deadline_s,
                        )
                        executor = NoticeExecutor(jobs, nodes, pods, policy, me, clock)
                        tasks.create_task(restarted("requesting drains", executor.run))

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_freeze((jobs, pods, nodes) if notices else (jobs, pods)))
                await leadership.lead(lead)
    finally:
        seen.jobs = seen.pods = None
        gc.unfreeze()
        await store.close()


async def _freeze(parts: Sequence[Jobs | Collection[Any]]) -> None:
    """Take what was read at the start out of garbage collections.

    One that looks at all pods of a large cluster stops every thread, and so each answer of the
    webhook, for longer than a plan takes. Counted references still free what is replaced; the rest
    is due once this view of the jobs ends.
    """
    for part in parts:
        await part.changed_after(0)
    gc.collect()
    gc.freeze()


async def run(config: ControllerConfig, environ: Mapping[str, str]) -> int:
    """Run until a signal stops it; ``environ`` has the defaults for what pods do not specify."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    sys.setswitchinterval(SWITCH_S)
    access = await asyncio.to_thread(access_of_pod, os.environ)
    async with ClusterApi(access) as api:
        await _serve(config, environ, api, stop)
    log.info("the controller was stopped", extra={"event": "stopped"})
    return 0


async def _serve(
    config: ControllerConfig, environ: Mapping[str, str], api: ClusterApi, stop: asyncio.Event
) -> None:
    host = f"{config.service}.{config.own_namespace}.svc"
    keeper = CertificateKeeper(
        api,
        config.own_namespace,
        config.certificate_secret,
        config.webhook,
        (host, f"{host}.cluster.local"),
        lambda: datetime.now(UTC),
    )
    metrics = AdmissionMetrics()
    seen = SeenMetrics(lambda: datetime.now(UTC), of_jobs=config.job_metrics == "on")
    metrics.registry.register(seen)
    seen.certificates["webhook"] = lambda: keeper.certificate
    store = store_access(config, environ, api)
    if store is not None:
        for name in ("store", "root"):
            seen.certificates[name] = partial(store.keeper.certificates.get, name)
    gives = bool(config.store_access) and config.give_access == "on"
    injector = Injector(
        api, environ, metrics, access=gives, release=config.release if gives else ""
    )
    if config.api_server_ca:
        ask_for_certificates(keeper.context, config.api_server_ca)
    callers = Callers(config.api_server_cidrs, bool(config.api_server_ca))
    pages = application(injector, metrics, keeper.ready, callers)
    clock = time.monotonic
    uninjected = UninjectedPods(api, injector, config.webhook, Events(api, clock), clock)
    evicts = config.evict_uninjected == "on" and config.events == "on"
    evictor = Evictor(api, uninjected, clock) if evicts else None
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(keeper.run())
        others: list[asyncio.Task[None]] = []
        if config.events == "on":
            telling = restarted("publishing Events of pods without a sidecar", uninjected.run)
            others.append(tasks.create_task(telling))
            seen.uninjected = uninjected
        if store is not None:
            others.append(tasks.create_task(store.run(give=gives)))
        if config.backups:
            backups = Backups(api, config.own_namespace, config.backups, metrics.registry)
            others.append(tasks.create_task(restarted("looking at backups", backups.run)))
        if config.follow_jobs == "on":
            others.append(tasks.create_task(_follow(config, api, store, seen, evictor)))
        async with serving(pages, config.listen, config.port, keeper.context) as port:
            log.info("the webhook listens on port %d", port, extra={"event": "listening"})
            stopped = tasks.create_task(stop.wait())
            await asyncio.wait((stopped, keeping), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            for task in others:
                task.cancel()
            await asyncio.wait((keeping,), timeout=LEAVE_S)
        keeping.cancel()


async def _follow(
    config: ControllerConfig,
    api: ClusterApi,
    store: StoreAccess | None,
    seen: SeenMetrics,
    evictor: Evictor | None,
) -> None:
    """Follow all jobs, once the store admits the controller."""
    access = config.access if store is None else await store.keeper.entered()
    await keep_following(config, api, access, seen, evictor)
