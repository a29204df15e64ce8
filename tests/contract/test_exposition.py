# SPDX-License-Identifier: Apache-2.0
"""The metrics' text is what Prometheus reads; alert rules and dashboard query what there is."""

from __future__ import annotations

import asyncio
import math
import re
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agent.telemetry.metrics import BUCKETS_S, Metrics, StoreMetrics, family
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

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('\\"\n'))


def read(text: str) -> dict[str, tuple[str, str, list[Sample]]]:
    """Parse a page: by family its type, its help and its samples, without times of creation."""
    return {
        one.name: (
            one.type,
            one.documentation,
            sorted(
                (sample for sample in one.samples if not sample.name.endswith("_created")), key=str
            ),
        )
        for one in text_string_to_metric_families(text)
        if not one.name.endswith("_created")
    }


@given(values=st.dictionaries(texts, st.floats(allow_nan=False)))
def test_a_labelled_gauge_reads_as_the_official_clients(values: dict[str, float]) -> None:
    registry, metrics = CollectorRegistry(), Metrics()
    official = Gauge("muster_round", "Newest\nround, \\ too.", ["run_id"], registry=registry)
    for label, value in values.items():
        official.labels(label).set(value)
    metrics.gauge("muster_round", "Newest\nround, \\ too.", lambda: values, "run_id")
    expected, found = read(generate_latest(registry).decode()), read(metrics.text().decode())
    assert found["muster_round"] == expected["muster_round"]


def test_calls_and_errors_read_as_the_official_clients() -> None:
    registry, found = CollectorRegistry(), StoreMetrics(lambda: 0.0)
    calls = Histogram(
        "muster_store_call_seconds",
        "How long calls to the store took, by call; those that failed, too.",
        ["call"],
        buckets=BUCKETS_S,
        registry=registry,
    )
    errors = Counter(
        "muster_store_errors",
        "Calls to the store that failed, by kind.",
        ["kind"],
        registry=registry,
    )
    for call, seconds in (("txn", 0.0), ("txn", 0.005), ("range", 0.0051), ("range", 30.0)):
        calls.labels(call).observe(seconds)
        found.called(call, seconds)
    for kind in ("StoreFull", "StoreFull", "StoreUnavailable"):
        errors.labels(kind).inc()
        found.failed(kind)
    assert read(found.text()) == read(generate_latest(registry).decode())


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e300, 12345678.9, -0.0])
def test_every_value_is_read_back(value: float) -> None:
    (only,) = read(family("muster_x", "gauge", "X.", [("muster_x", {}, value)])).values()
    assert only[2][0].value == value


def test_a_name_is_a_gauge_of_its_own() -> None:
    metrics = Metrics()
    metrics.gauge("muster_x", "X.", lambda: 1.0)
    with pytest.raises(ValueError, match="muster_x"):
        metrics.gauge("muster_x", "X.", lambda: 2.0)


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
