# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics: read from the live objects at each scrape, at no cost in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic

from agent.telemetry.exposition import family
from agent.telemetry.store_metrics import StoreMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


Read = Callable[[], float | Mapping[str, float] | Mapping[tuple[str, ...], float]]
"""The value of a gauge; of one with labels, a value for each of theirs."""


class Metrics:
    """The metrics of one sidecar."""

    def __init__(self) -> None:
        self.store = StoreMetrics(monotonic)
        self._gauges: dict[str, Callable[[], str]] = {}

    def gauge(
        self,
        name: str,
        help_text: str,
        read: Read,
        *labels: str,
    ) -> None:
        """Add a gauge that is read at each scrape; ``read`` of a labelled one returns a dict."""

        def text() -> str:
            value = read()
            if not isinstance(value, Mapping):
                return family(name, "gauge", help_text, [(name, {}, value)])
            keyed = [((one,) if isinstance(one, str) else one, at) for one, at in value.items()]
            samples = [(name, dict(zip(labels, of, strict=True)), at) for of, at in sorted(keyed)]
            return family(name, "gauge", help_text, samples)

        if name in self._gauges:
            raise ValueError(f"there is a gauge {name} already")
        self._gauges[name] = text

    def text(self) -> bytes:
        """Render the metrics in Prometheus' text format."""
        gauges = (text() for text in self._gauges.values())
        return "".join((self.store.text(), *gauges)).encode()
