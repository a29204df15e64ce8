# SPDX-License-Identifier: Apache-2.0
"""``admission``: the pods of one Job of 1,000, through the webhook of the chart, in ``kubelab``.

Own time is what each replica counts, by the clock and by the processor; the API server's view of
the same calls is beside it, and what the processes took of the processor altogether, TLS and log
included. No pod is given to a node: an admission is over before. Needs root.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from benchmarks.figures import Bar, Figure
from benchmarks.processor_time import cpu_s
from tests.support.cluster.chart_release import NAMESPACE, ChartRelease
from tests.support.cluster.claim import claimed
from tests.support.cluster.lab import Kubelab, Object

PODS = 1000
PATIENCE_S = 500.0
"""For the controller manager, which makes twenty pods a second at most."""
OWN_TIME_MAX_S = 0.05
CALL_TIMEOUT_S = 60
HOOK = "pods.inject.muster.dev"
API_SERVERS = "apiserver_admission_webhook_admission_duration_seconds"
OWN = "muster_controller_admission_seconds"
OWN_CPU = "muster_controller_admission_cpu_seconds"


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many were at most so long, by bound in seconds, as Prometheus counts."""

    counts: Mapping[float, float]

    def since(self, before: Distribution) -> Distribution:
        return Distribution({b: n - before.counts.get(b, 0) for b, n in self.counts.items()})

    def beside(self, other: Distribution) -> Distribution:
        bounds = {*self.counts, *other.counts}
        return Distribution(
            {b: self.counts.get(b, 0) + other.counts.get(b, 0) for b in sorted(bounds)}
        )

    @property
    def total(self) -> int:
        return int(self.counts.get(math.inf, 0))

    def share_within(self, bound_s: float) -> float:
        return self.counts[bound_s] / self.total

    def at_most(self, share: float) -> float:
        """The bound that this share is not above."""
        return min(b for b, n in self.counts.items() if n >= share * self.total)


def distribution(text: str, name: str, labels: str = "") -> Distribution:
    """Read one histogram of a page of metrics; ``labels``: words its lines have to have."""
    counts: dict[float, float] = {}
    line = re.compile(rf"^{name}_bucket{{(.*)}} (\S+)$", re.MULTILINE)
    for told, count in line.findall(text):
        if labels in told:
            bound = float(re.search(r'le="([^"]+)"', told)[1])  # type: ignore[index]
            counts[bound] = counts.get(bound, 0) + float(count)
    return Distribution(counts)


async def measure(pods: int = PODS) -> list[Figure]:
    """Measure in a cluster which is ended if it was not there before."""
    return await asyncio.to_thread(_measure, pods)


def _measure(pods: int) -> list[Figure]:
    lab = Kubelab()
    with claimed(lab):
        lab.command("up", timeout_s=900)
        with ChartRelease(lab) as chart:
            return _figures(chart, pods)


def _figures(chart: ChartRelease, pods: int) -> list[Figure]:
    replicas = chart.lab.pods(NAMESPACE, "app.kubernetes.io/component=controller")
    before = [_page(one) for one in replicas]
    processes = _processes()
    spent_s = {pid: cpu_s(pid) for pid in processes}
    asked_before = distribution(chart.lab.kubectl("get", "--raw", "/metrics"), API_SERVERS, HOOK)
    began_s = monotonic()
    _make(chart.lab, pods)
    took_s = monotonic() - began_s
    asked = distribution(chart.lab.kubectl("get", "--raw", "/metrics"), API_SERVERS, HOOK)
    asked = asked.since(asked_before)
    own, own_cpu = Distribution({}), Distribution({})
    for one, page in zip(replicas, before, strict=True):
        now = _page(one)
        own = own.beside(distribution(now, OWN).since(distribution(page, OWN)))
        own_cpu = own_cpu.beside(distribution(now, OWN_CPU).since(distribution(page, OWN_CPU)))
    assert own.total >= pods, f"{own.total} of {pods} pods came through the webhook"
    process_s = sum(cpu_s(pid) - spent_s[pid] for pid in processes)

    def at_most(name: str, found: Distribution, bar: Bar | None = None) -> list[Figure]:
        return [
            Figure(f"admission/{name}, p50 at most", found.at_most(0.5), "s", None, ()),
            Figure(f"admission/{name}, p99 at most", found.at_most(0.99), "s", bar, ()),
        ]

    return [
        *at_most("own time", own, Bar("value", "<=", OWN_TIME_MAX_S)),
        Figure("admission/own time, within 50 ms", own.share_within(OWN_TIME_MAX_S), "", None, ()),
        *at_most("own processor time", own_cpu, Bar("value", "<=", OWN_TIME_MAX_S)),
        *at_most("the API server's view", asked),
        Figure("admission/both processes, for a pod", process_s / own.total, "CPU s", None, ()),
        Figure("admission/pods made", own.total / took_s, "1/s", None, ()),
    ]


def _make(lab: Kubelab, pods: int) -> None:
    """Have the controller manager make the pods of a Job, and take them away again."""
    namespace = f"admission-{secrets.token_hex(4)}"
    lab.make_namespace(namespace)
    try:
        lab.apply(namespace, job(pods))
        deadline_s = monotonic() + PATIENCE_S
        made = 0
        while made < pods:
            assert monotonic() < deadline_s, f"{made} of {pods} pods after {PATIENCE_S:g} s"
            sleep(1)
            status = lab.get(namespace, "job", "digits").get("status", {})
            made = int(status.get("active", 0))
        lab.kubectl("-n", namespace, "delete", "job", "digits", "--wait=false")
    finally:
        lab.remove_namespace(namespace)


def job(pods: int) -> Object:
    """A labelled Indexed Job that no scheduler looks at."""
    container = {
        "name": "trainer",
        "image": "example.org/digits:1.0",
        "command": ["torchrun", "--nproc-per-node=2", "/app/train.py"],
        "env": [{"name": "CHECKPOINT_DIR", "value": "/checkpoints"}],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
    }
    metadata = {
        "labels": {"muster.dev/inject": "true"},
        "annotations": {"muster.dev/min": "2", "muster.dev/max": str(pods)},
    }
    spec = {
        "restartPolicy": "Never",
        "schedulingGates": [{"name": "example.org/never"}],
        "containers": [container],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "digits"},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "template": {"metadata": metadata, "spec": spec},
        },
    }


def _page(pod: Object) -> str:
    """The metrics of one replica, whose certificate is for its Service."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = f"https://{pod['status']['podIP']}:9443/metrics"
    with urllib.request.urlopen(url, context=context, timeout=CALL_TIMEOUT_S) as answer:
        return str(answer.read().decode())


def _processes() -> list[int]:
    """The replicas, as this machine sees them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"controller" in words and any(w.startswith(b"--own-namespace=") for w in words):
            found.append(int(folder.name))
    return found
