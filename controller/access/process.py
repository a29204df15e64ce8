# SPDX-License-Identifier: Apache-2.0
"""The controller's component that gives jobs access to the store, built from its configuration."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from controller.access.decision import AccessPolicy
from controller.access.executor import AccessExecutor
from controller.access.jobs import JobsWithPods
from controller.access.reconciler import AccessReconciler
from controller.access.store_keeper import StoreKeeper, StoreSecrets
from controller.cluster.api import ClusterApi
from controller.cluster.events import Events
from controller.config import ControllerConfig
from controller.defect import restarted
from injection.settings import TABLE
from rdzv.errors import ConfigError
from rdzv.flags import named
from rdzv.store.access import Access
from rdzv.store.etcd.accounts import Accounts

FOLDER = Path(tempfile.gettempdir()) / "muster-store"
"""The folder of the controller's own credentials for the store."""


class StoreAccess:
    """The upkeep of the store's certificates and of each job's access."""

    def __init__(
        self, keeper: StoreKeeper, policy: AccessPolicy, api: ClusterApi, release: str
    ) -> None:
        self.keeper = keeper
        self._release = release
        self._policy = policy
        self._api = api

    async def run(self, *, give: bool) -> None:
        """Maintain the certificates until cancelled and, with ``give``, also the jobs' access.

        A failure is reported and retried: it must not take the webhook down.
        """
        await restarted("keeping the store's access", partial(self._run, give=give))

    async def _run(self, *, give: bool) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.keeper.run())
            if give:
                await self.keeper.ready.wait()
                assert self.keeper.entry is not None
                await self._give(self.keeper.entry.access)

    async def _give(self, access: Access) -> None:
        accounts, events = Accounts(access), Events(self._api, time.monotonic)
        jobs = JobsWithPods(self._api, self._release)
        executor = AccessExecutor(
            self._api,
            accounts,
            self.keeper,
            self._policy,
            jobs.__contains__,
            now,
            events,
            self._release,
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
    """Build the component; None if the controller manages no access and no members' certificate.

    Raises ``ConfigError`` if the store's endpoints do not use TLS.
    """
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
    return StoreAccess(keeper, policy, api, config.release)


def now() -> datetime:
    """Return the current time, in UTC."""
    return datetime.now(UTC)
