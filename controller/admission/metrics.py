# SPDX-License-Identifier: Apache-2.0
"""Metrics of the admission webhook, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from controller.admission.decision import Verdict

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class AdmissionMetrics:
    """The number of admissions by outcome, and how long they took."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._pods = Counter(
            "muster_controller_admissions",
            "Pods that asked for a sidecar, by outcome: injected, unchanged or refused.",
            ["outcome"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "muster_controller_admission_seconds",
            "Own time of the webhook for one pod, the read of its owner included.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )

        self._cpu_seconds = Histogram(
            "muster_controller_admission_cpu_seconds",
            "Processor time of the webhook for one pod: what a busy machine does not stretch.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def count(self, verdict: Verdict, seconds: float, cpu_seconds: float) -> None:
        """Count one admission."""
        outcome = "injected" if verdict.injected else "refused" if verdict.warnings else "unchanged"
        self._pods.labels(outcome).inc()
        self._seconds.observe(seconds)
        self._cpu_seconds.observe(cpu_seconds)

    def text(self) -> bytes:
        """Render all metrics in Prometheus's text format."""
        return generate_latest(self.registry)
