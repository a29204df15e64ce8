# SPDX-License-Identifier: Apache-2.0
"""The time of the last backup of etcd."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from controller.metrics import Backups, newest_success
from rdzv.errors import ClusterUnavailable

METRIC = "muster_controller_backup_timestamp_seconds"


def cron_job(last: str = "") -> dict[str, Any]:
    return {"status": {"lastSuccessfulTime": last} if last else {}}


class Api:
    """An API server with CronJobs by name."""

    def __init__(self, **jobs: dict[str, Any]) -> None:
        self.jobs = jobs
        self.away = False

    async def get(self, path: str) -> dict[str, Any]:
        assert path.startswith("/apis/batch/v1/namespaces/muster-system/cronjobs/")
        if self.away:
            raise ClusterUnavailable("it is away")
        return self.jobs[path.rpartition("/")[2]]


def test_the_newest_of_the_week_counts() -> None:
    jobs = [cron_job(), cron_job("1970-01-02T00:00:00Z"), cron_job("1970-01-03T00:00:00Z")]
    assert newest_success(jobs) == 2 * 86_400


def test_no_backup_at_all_is_of_long_ago() -> None:
    assert newest_success([cron_job(), {}]) == 0


async def test_the_last_look_counts_while_the_api_server_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = CollectorRegistry()
    api: Any = Api(a=cron_job("1970-01-02T00:00:00Z"), b=cron_job())
    backups = Backups(api, "muster-system", ["a", "b"], registry)
    await backups.step()
    api.away = True
    with caplog.at_level(logging.WARNING):
        await backups.step()
        await backups.step()
    assert f"{METRIC} 86400.0" in generate_latest(registry).decode()
    assert [one.message for one in caplog.records] == [
        "the age of the backups of etcd is not known: it is away"
    ]
