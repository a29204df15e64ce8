# SPDX-License-Identifier: Apache-2.0
"""The controller's process: its components, signals and exit status.

Status: 0 if stopped, 2 for configuration, 70 for a defect. An unavailable API server ends nothing:
the controller goes on serving what it knows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial

from controller.access.process import StoreAccess, store_access
from controller.admission.evictor import Evictor
from controller.admission.injector import Injector
from controller.admission.metrics import AdmissionMetrics
from controller.admission.uninjected import UninjectedPods
from controller.backups import Backups
from controller.certificates.keeper import CertificateKeeper
from controller.cluster.access import access_of_pod
from controller.cluster.api import ClusterApi
from controller.cluster.events import Events
from controller.config import ControllerConfig
from controller.defect import restarted
from controller.following import keep_following
from controller.metrics import SeenMetrics
from controller.serving import Callers, application, ask_for_certificates, serving

log = logging.getLogger(__name__)

LEAVE_S = 5.0
"""Time for which the webhook still answers after a stop signal: the API server goes on asking
until it learns that this replica stops, and a pod that gets no answer starts without Muster."""


SWITCH_S = 0.0005
"""Time after which a thread that plans a pod yields the interpreter to the event loop. An answer by
TLS needs it a dozen times: by Python's default of 5 ms, ``/readyz`` waits for the whole plan."""


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
