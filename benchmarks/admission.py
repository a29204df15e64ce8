# SPDX-License-Identifier: Apache-2.0
"""``admission``: the pods of one Job of 1,000, through the webhook, before a real API server.

etcd, the API server and the controller manager of ``scripts/kubelab`` run as processes of this
machine, without nodes, as an admission precedes scheduling. The webhook is one replica, a process
of its own. Own time is what it measures itself, by the clock and by the processor; beside it is the
API server's view of the same calls.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from benchmarks.admission_server import ApiServer
from benchmarks.figures import Bar, Figure, of_one
from rdzv.errors import ClusterRefused
from tests.support.ports import free_ports

PODS = 1000
PATIENCE_S = 300.0
OWN_TIME_MAX_S = 0.05
CALL_TIMEOUT_S = 60
HOOK = "pods.inject.muster.dev"
API_SERVERS = "apiserver_admission_webhook_admission_duration_seconds"
OWN = "muster_controller_admission_seconds"
OWN_CPU = "muster_controller_admission_cpu_seconds"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
LABELLED = "/api/v1/namespaces/default/pods?labelSelector=muster.dev%2Finject%3Dtrue"
JOBS = "/apis/batch/v1/namespaces/default/jobs"


@dataclass(frozen=True, slots=True)
class Distribution:
    """A Prometheus histogram: the number of values up to each bound, in seconds."""

    counts: Mapping[float, float]

    @property
    def total(self) -> int:
        return int(self.counts.get(math.inf, 0))

    def at_most(self, share: float) -> float:
        """Return the smallest bound that covers at least this share of the values."""
        return min(b for b, n in self.counts.items() if n >= share * self.total)


def distribution(text: str, name: str, labels: str = "") -> Distribution:
    """Parse one histogram of a metrics page, of the series that contain ``labels``."""
    counts: dict[float, float] = {}
    for told, count in re.findall(rf"^{name}_bucket{{(.*)}} (\S+)$", text, re.MULTILINE):
        bound = re.search(r'le="([^"]+)"', told)
        if labels in told and bound is not None:
            counts[float(bound[1])] = counts.get(float(bound[1]), 0) + float(count)
    return Distribution(counts)


async def measure(pods: int = PODS) -> list[Figure]:
    """Run the benchmark; every process that it starts is terminated."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        return await asyncio.to_thread(_measure, Path(folder), pods)


def _measure(folder: Path, pods: int) -> list[Figure]:
    with ApiServer(folder) as server:
        (port,) = free_ports(1)
        name = "muster-controller"
        secret = {"metadata": {"name": name}}
        server.call("POST", "/api/v1/namespaces/default/secrets", secret)
        server.call("POST", CONFIGURATIONS, _webhook(name, port))
        command = [sys.executable, "-m", "benchmarks.admission_webhook"]
        server.start("webhook", [*command, server.url, str(folder), str(port)])
        _until_ready(port)
        sleep(2)  # the API server rereads webhook configurations every second
        _make(server, pods)
        page = _page(port, "/metrics")
        own, own_cpu = distribution(page, OWN), distribution(page, OWN_CPU)
        asked = distribution(server.text("/metrics"), API_SERVERS, HOOK)
        injected = server.call("GET", LABELLED)["items"]
        with_it = sum("initContainers" in one["spec"] for one in injected)
    assert own.total == pods, f"{own.total} of {pods} pods came through the webhook"

    bar = Bar("value", "<=", OWN_TIME_MAX_S)
    return [
        of_one("admission/own time, p99 at most", "s", bar, own.at_most(0.99)),
        of_one("admission/own processor time, p99 at most", "s", None, own_cpu.at_most(0.99)),
        of_one("admission/the API server's view, p99 at most", "s", None, asked.at_most(0.99)),
        of_one("admission/pods with a sidecar", "", Bar("value", "==", pods), with_it),
    ]


def _make(server: ApiServer, pods: int) -> None:
    """Have the controller manager create the pods of a Job."""
    began_s = monotonic()
    server.call("POST", JOBS, job(pods))
    made = 0
    while made < pods:
        assert monotonic() < began_s + PATIENCE_S, f"{made} of {pods} pods: {server.last_lines()}"
        sleep(0.5)
        made = int(server.call("GET", f"{JOBS}/digits").get("status", {}).get("active", 0))


def job(pods: int) -> dict[str, object]:
    """Build a labelled Indexed Job."""
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
    return {
        "metadata": {"name": "digits"},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "template": {
                "metadata": metadata,
                "spec": {"restartPolicy": "Never", "containers": [container]},
            },
        },
    }


def _webhook(name: str, port: int) -> dict[str, object]:
    """Build the chart's webhook configuration, by URL, as Services do not work without nodes."""
    return {
        "metadata": {"name": name},
        "webhooks": [
            {
                "name": HOOK,
                "admissionReviewVersions": ["v1"],
                "sideEffects": "NoneOnDryRun",
                "failurePolicy": "Ignore",
                "reinvocationPolicy": "IfNeeded",
                "timeoutSeconds": 5,
                "clientConfig": {"url": f"https://localhost:{port}/inject"},
                "objectSelector": {"matchLabels": {"muster.dev/inject": "true"}},
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["pods"],
                    }
                ],
            }
        ],
    }


def _until_ready(port: int) -> None:
    deadline_s = monotonic() + PATIENCE_S
    while monotonic() < deadline_s:
        try:
            _page(port, "/readyz")
            return
        except OSError:
            sleep(0.2)
    raise ClusterRefused("the webhook is not ready", 503)


def _page(port: int, path: str) -> str:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = f"https://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(url, context=context, timeout=CALL_TIMEOUT_S) as answer:
        return str(answer.read().decode())
