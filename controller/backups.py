# SPDX-License-Identifier: Apache-2.0
"""The time of the last backup of etcd, as a metric: from the CronJobs that do it, by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry, Gauge

from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from rdzv.diary import Diary
from rdzv.errors import ClusterError
from rdzv.reconcile import Loop, Outlook

log = logging.getLogger(__name__)

LOOK_S = 300.0
"""Time between two looks, in seconds: a backup is due each day."""


def newest_success(jobs: Iterable[Object]) -> float:
    """Return the time of the newest success of CronJobs, in Unix seconds; 0 without any."""
    times = ((one.get("status") or {}).get("lastSuccessfulTime") for one in jobs)
    return max((datetime.fromisoformat(one).timestamp() for one in times if one), default=0.0)


class Backups(Loop):
    """Looks at CronJobs of the controller's namespace; each replica does, for its own metric."""

    def __init__(
        self, api: ClusterApi, namespace: str, names: Sequence[str], registry: CollectorRegistry
    ) -> None:
        super().__init__()
        self._api = api
        self._paths = [paths.cron_job(namespace, name) for name in names]
        self._diary = Diary(log)
        self._newest = Gauge(
            "muster_controller_backup_timestamp_seconds",
            "Time of the newest backup of etcd that could be restored, in Unix seconds; 0: none.",
            registry=registry,
        )

    async def step(self) -> Outlook:
        """Read the CronJobs; what was seen last stays while the API server is away."""
        try:
            found = [await self._api.get(path) for path in self._paths]
        except ClusterError as error:
            sentence = f"the age of the backups of etcd is not known: {error}"
            self._diary.say(sentence, level=logging.WARNING, topic="unread")
        else:
            self._diary.forget()
            self._newest.set(newest_success(found))
        return Outlook(look_at_s=self.clock() + LOOK_S)
