# SPDX-License-Identifier: Apache-2.0
"""The controller's part that gives jobs access to the store, put together of its configuration."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from controller.access.decision import AccessPolicy
from controller.access.executor import AccessExecutor
from controller.access.jobs import JobsWithPods
from controller.access.reconciler import AccessReconciler
from controller.access.store_keeper import StoreKeeper, StoreSecrets
from controller.cluster.api import ClusterApi
from controller.cluster.events import Events
from controller.config import ControllerConfig
from controller.defect import tell_defect
from injection.settings import TABLE
from rdzv.errors import ConfigError
from rdzv.flags import named
from rdzv.store.access import Access
from rdzv.store.etcd.accounts import Accounts

AGAIN_S = 30.0
"""After a defect: pods go on being answered for meanwhile."""
FOLDER = Path(tempfile.gettempdir()) / "muster-store"
"""Where the files lie by which the controller itself gets into the store."""


class StoreAccess:
    """The store's certificates, and each job's access."""

    def __init__(self, keeper: StoreKeeper, policy: AccessPolicy, api: ClusterApi) -> None:
        self.keeper = keeper
        self._policy = policy
        self._api = api

    async def run(self, *, give: bool) -> None:
        """Keep the certificates until cancelled, and ``give`` jobs their access.

        What is wrong here must not take the webhook along.
        """
        while True:
            try:
                await self._run(give=give)
            except Exception as error:
                tell_defect(str(error), error)
            await asyncio.sleep(AGAIN_S)

    async def _run(self, *, give: bool) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.keeper.run())
            if give:
                await self.keeper.ready.wait()
                assert self.keeper.entry is not None
                await self._give(self.keeper.entry.access)

    async def _give(self, access: Access) -> None:
        accounts, events = Accounts(access), Events(self._api, time.monotonic)
        jobs = JobsWithPods(self._api)
        executor = AccessExecutor(
            self._api, accounts, self.keeper, self._policy, jobs.__contains__, now, events
        )
        reconciler = AccessReconciler(executor, jobs, now)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(jobs.run())
                tasks.create_task(reconciler.run())
                tasks.create_task(events.run())
        finally:
            await accounts.close()


def store_access(
    config: ControllerConfig, environ: Mapping[str, str], api: ClusterApi
) -> StoreAccess | None:
    """That part, or None where the store's certificates are nobody's; raises ``ConfigError``."""
    hosts = tuple(filter(None, config.store_hosts.split(",")))
    if not config.store_access and not config.store_members:
        return None
    endpoints = TABLE["etcd_endpoints"].parse(environ.get(TABLE["etcd_endpoints"].variable, ""))
    if not endpoints or not endpoints[0].startswith("https://"):
        raise ConfigError(
            f"{named('--store-access')} and {named('--store-members')} are for a store with TLS:"
            " give --default etcd-endpoints=https://…"
        )
    names = StoreSecrets(
        config.own_namespace,
        config.store_access,
        config.store_members,
        hosts,
        own=bool(config.store_members),
    )
    keeper = StoreKeeper(api, names, tuple(endpoints), FOLDER, now)
    policy = AccessPolicy(
        timedelta(seconds=config.access_keep_s), timedelta(seconds=config.access_rotate_s)
    )
    return StoreAccess(keeper, policy, api)


def now() -> datetime:
    """The hour."""
    return datetime.now(UTC)
