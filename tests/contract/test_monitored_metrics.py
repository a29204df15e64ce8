# SPDX-License-Identifier: Apache-2.0
"""Alert rules and dashboard query only what the controller, a sidecar and etcd really expose."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from controller.admission.injector import AdmissionMetrics
from controller.jobs import Jobs
from controller.metrics import Backups, SeenMetrics
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.shown import Shown
from tests.support.sidecars.processes import sidecar
from tests.support.sources import ROOT
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.waiting import DEADLINE_S

FILES = ROOT / "charts" / "muster" / "files"
QUERIES = {name: (FILES / name).read_text() for name in ("alerts.yaml", "dashboard.json")}
QUERIED = re.compile(r"\b(?:muster|etcd)_[a-z0-9_]+\b")


TARGETS = {"muster_dev_job"}
"""Labels that the chart's PodMonitor has Prometheus add, by its ``podTargetLabels``."""


def exposed(page: str) -> set[str]:
    """The names of a page's metrics, also of those that have no sample yet."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE):
        found |= {name, *(f"{name}_{part}" for part in ("bucket", "sum", "count"))}
        if kind != "histogram":
            found -= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    return found


async def controllers_page() -> str:
    metrics, seen = AdmissionMetrics(), SeenMetrics(lambda: datetime.now(UTC), of_jobs=True)
    metrics.registry.register(seen)
    nobody: Any = None
    Backups(nobody, "muster-system", (), metrics.registry)
    pods: Any = Shown()
    uninjected: Any = SimpleNamespace(pods=list)
    async with Jobs(MemoryStore(), time.monotonic, Random(1)).following() as jobs:
        await jobs.changed_after(0)
        seen.jobs, seen.pods, seen.uninjected = jobs, pods, uninjected
        return metrics.text().decode()


def etcds_page() -> str:
    with (
        EtcdCluster(1) as etcd,
        urllib.request.urlopen(f"{etcd.metrics_urls[0]}/metrics", timeout=DEADLINE_S) as answer,
    ):
        return str(answer.read().decode())


async def test_each_query_is_of_metrics_that_the_product_exposes(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    async with sidecar(server.endpoint, tmp_path) as one:
        await one.until_ready()
        _, sidecars = await one.get("/metrics")
    etcd = await asyncio.to_thread(etcds_page)
    known = exposed(await controllers_page()) | exposed(sidecars) | exposed(etcd)
    for name, text in QUERIES.items():
        queried = {*QUERIED.findall(re.sub(r"^#.*$", "", text, flags=re.MULTILINE))}
        assert len(queried) > 5, name
        assert queried <= known | TARGETS, f"{name}: {queried - known}"
