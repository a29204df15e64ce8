# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus on this machine, which goes by the lab's PodMonitors and PrometheusRule.

What the Prometheus Operator makes of them is made here, as no operator runs; and targets are found
here, as Debian's Prometheus knows no Kubernetes.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from controller.admission.uninjected import selects
from tests.support.chart import prometheus_program
from tests.support.cluster.chart_release import NAMESPACE
from tests.support.cluster.lab import KubectlFailed, Kubelab, Object
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

INTERVAL_S = 5
ANSWER_S, START_S, END_S = 30.0, 120.0, 30.0
_COMPARISON = re.compile(r"(==|!=|>=|<=|>|<)(?= )")


class Prometheus:
    """``with Prometheus(lab, folder) as prometheus``: of the chart's release, and all jobs."""

    def __init__(self, lab: Kubelab, folder: Path) -> None:
        self._lab = lab
        self._folder = folder
        (self._port,) = free_ports(1)
        self._over = threading.Event()
        self._finding = threading.Thread(target=self._find, daemon=True)

    def __enter__(self) -> Self:
        self._folder.mkdir()
        self._monitors = self._lab.get(NAMESPACE, "podmonitors")["items"]
        (rules,) = self._lab.get(NAMESPACE, "prometheusrules")["items"]
        every = f"{INTERVAL_S}s"
        written: dict[str, Object] = {
            "rules.json": rules["spec"],
            "config.json": {
                "global": {"scrape_interval": every, "evaluation_interval": every},
                "rule_files": [str(self._folder / "rules.json")],
                "scrape_configs": [self._scrapes(one) for one in self._monitors],
            },
        }
        for name, content in written.items():
            (self._folder / name).write_text(json.dumps(content))
        words = {
            "config.file": self._folder / "config.json",
            "storage.tsdb.path": self._folder / "data",
            "web.listen-address": f"127.0.0.1:{self._port}",
        }
        self.began_s = time.time()
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [prometheus_program("prometheus"), *(f"--{k}={v}" for k, v in words.items())],
                stdout=log,
                stderr=log,
            )
        self._finding.start()
        try:
            wait_until(self._is_ready, START_S, "Prometheus is ready", self.log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._finding.join()
        self._process.terminate()
        self._process.wait(timeout=END_S)

    def log(self) -> str:
        """What it has said."""
        return (self._folder / "log").read_text()

    def targets(self) -> dict[str, set[str]]:
        """How its targets are, by PodMonitor: up, down, or unknown."""
        found: dict[str, set[str]] = {}
        for one in self._asked("targets", state="active")["activeTargets"]:
            found.setdefault(one["scrapePool"], set()).add(one["health"])
        return found

    def now(self, expression: str) -> list[float]:
        """The present values of an expression."""
        found = self._asked("query", query=expression)["result"]
        return [float(one["value"][1]) for one in found]

    def firing(self) -> set[str]:
        """Alerts that fire."""
        found = self._asked("alerts")["alerts"]
        return {one["labels"]["alertname"] for one in found if one["state"] == "firing"}

    def without_data(self, expressions: Iterable[str]) -> list[str]:
        """Those that have not had any sample since it began."""
        within = {"start": self.began_s - INTERVAL_S, "end": time.time(), "step": INTERVAL_S}
        return [
            one
            for one in expressions
            if not self._asked("query_range", query=one, **within)["result"]
        ]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=ANSWER_S):
                return True
        except OSError:
            return False

    def _asked(self, what: str, **words: object) -> Any:
        address = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urlencode(words)}"
        with urllib.request.urlopen(address, timeout=ANSWER_S) as answer:
            return json.load(answer)["data"]

    def _scrapes(self, monitor: Object) -> Object:
        """The configuration for a PodMonitor with one endpoint."""
        name, (endpoint,) = monitor["metadata"]["name"], monitor["spec"]["podMetricsEndpoints"]
        files = [str(self._folder / f"{name}.json")]
        made: Object = {"job_name": name, "file_sd_configs": [{"files": files}]}
        if endpoint.get("scheme") == "https":
            tls, file = endpoint["tlsConfig"], self._folder / f"{name}.crt"
            secret = self._lab.get(NAMESPACE, "secret", tls["ca"]["secret"]["name"])
            file.write_bytes(base64.b64decode(secret["data"][tls["ca"]["secret"]["key"]]))
            trusted = {"ca_file": str(file), "server_name": tls["serverName"]}
            made |= {"scheme": "https", "tls_config": trusted}
        return made

    def _find(self) -> None:
        """Keep the targets of each PodMonitor up to date."""
        while not self._over.wait(INTERVAL_S):
            with suppress(KubectlFailed):
                text = self._lab.kubectl("get", "pods", "--all-namespaces", "-o", "json")
                for one in self._monitors:
                    file = self._folder / f"{one['metadata']['name']}.json"
                    aside = file.with_suffix(".new")
                    aside.write_text(json.dumps(_targets(one, json.loads(text)["items"])))
                    aside.replace(file)


def _targets(monitor: Object, pods: Iterable[Object]) -> list[Object]:
    """What a PodMonitor selects, with the labels that the operator gives it."""
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    everywhere = spec.get("namespaceSelector", {}).get("any", False)
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                "namespace": pod["metadata"]["namespace"],
                "pod": pod["metadata"]["name"],
                "container": container["name"],
            },
        }
        for pod in pods
        if everywhere or pod["metadata"]["namespace"] == monitor["metadata"]["namespace"]
        if selects(spec["selector"], pod["metadata"].get("labels", {}))
        if pod["status"].get("podIP") and pod["status"]["phase"] not in ("Failed", "Succeeded")
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
        for port in container.get("ports", ())
        if port.get("name") == endpoint["port"]
    ]


def judged(expression: str) -> str:
    """An alert's expression that has a sample, 0 or 1, whether the alert comes or not."""
    text, depth, at = "", 0, 0
    while at < len(expression):
        found = _COMPARISON.match(expression, at) if depth == 0 else None
        text += f"{found[1]} bool" if found else expression[at]
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(expression[at], 0)
        at = found.end() if found else at + 1
    return text
