# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics: read from the live objects at each scrape, at no cost in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.telemetry.store_metrics import StoreMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one sidecar, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.store = StoreMetrics(self._registry, monotonic)

    def gauge(
        self,
        name: str,
        help_text: str,
        read: Callable[[], float | dict[str, float]],
        label: str = "",
    ) -> None:
        """Add a gauge that is read at each scrape; ``read`` of a labelled one returns a dict."""
        self._registry.register(_Gauge(name, help_text, read, label))

    def text(self) -> bytes:
        """Render the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Gauge(Collector):
    def __init__(
        self,
        name: str,
        help_text: str,
        read: Callable[[], float | dict[str, float]],
        label: str,
    ) -> None:
        self._name = name
        self._help = help_text
        self._read = read
        self._label = label

    def collect(self) -> Iterable[Metric]:
        value = self._read()
        if isinstance(value, dict):
            family = GaugeMetricFamily(self._name, self._help, labels=[self._label])
            for label, number in sorted(value.items()):
                family.add_metric([label], number)
        else:
            family = GaugeMetricFamily(self._name, self._help, value=value)
        yield family

    def describe(self) -> Iterable[Metric]:
        # Without this the registry would read the value to learn the name.
        return (GaugeMetricFamily(self._name, self._help),)
