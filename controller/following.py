# SPDX-License-Identifier: Apache-2.0
"""The controller's view of the store's jobs, and its tasks that depend on it."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Any

from controller.admission.evictor import Evictor
from controller.cluster import paths
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from controller.cluster.events import Events
from controller.config import ControllerConfig
from controller.defect import AGAIN_S, each_of, restarted, tell_pause
from controller.events.reporter import EventReporter
from controller.jobs.jobs import Jobs
from controller.leader.leadership import Leadership
from controller.metrics import SeenMetrics
from controller.notices.executor import NoticeExecutor
from controller.notices.node import node_seen
from controller.notices.policy import NoticePolicy
from controller.owners.owners import Owners
from controller.owners.pods import pod_seen
from controller.owners.reconciler import OwnerReconciler
from controller.owners.unplaced import UnplacedWriter
from controller.page.serving import serving_page
from rdzv.errors import MusterError
from rdzv.store.access import Access
from rdzv.store.open import open_store

log = logging.getLogger(__name__)


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
            for error in each_of(group):
                log.error(
                    "cannot follow jobs, retrying: %s", error, extra={"event": "not_following"}
                )
        except* Exception as group:
            for error in each_of(group):
                tell_pause("following jobs", error)
        await asyncio.sleep(AGAIN_S)


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
