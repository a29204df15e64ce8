# SPDX-License-Identifier: Apache-2.0
"""The metrics' text is what Prometheus' own client reads, and writes, for the same values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agent.telemetry.metrics import BUCKETS_S, Metrics, StoreMetrics, family

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
