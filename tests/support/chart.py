# SPDX-License-Identifier: Apache-2.0
"""The chart, as helm renders it."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import yaml

from sidecar_image.engine import CACHE
from tests.support.programs import ran
from tests.support.sources import ROOT

CHART = ROOT / "charts" / "muster"
BUILD_TIMEOUT_S = 1500.0
"""The first time, they are built."""


def helm_program() -> Path:
    """The real helm, which is built where it is not there."""
    return _built("helm", "helm")


def etcdutl_program() -> Path:
    """The real etcdutl, which is built where it is not there."""
    return _built("etcdutl", "etcdutl")


def prometheus_program(name: str) -> Path:
    """The real prometheus, or promtool, which is downloaded if it is not there."""
    return _built("prometheus", name)


@cache
def _built(toolchain: str, name: str) -> Path:
    program = ROOT / "scripts" / "toolchain" / toolchain
    done = ran(program, timeout_s=BUILD_TIMEOUT_S, MUSTER_CACHE=str(CACHE))
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()) / name


def helm(*arguments: str, kubeconfig: Path | None = None, timeout_s: float = 300.0) -> str:
    """Run helm; raises ``HelmFailed`` with what it said."""
    cluster = str(kubeconfig or os.devnull)
    done = ran(helm_program(), *arguments, timeout_s=timeout_s, KUBECONFIG=cluster)
    if done.returncode != 0:
        raise HelmFailed(f"{done.stderr}{done.stdout}".strip())
    return done.stdout


class HelmFailed(Exception):
    """helm ended with a status other than 0."""


def rendered(
    *values: str, version: str = "1.36.0", more: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The objects of a release ``muster`` in ``muster-system``; each value is KEY=VALUE.

    ``more``: values as values.yaml has them.
    """
    given = [word for value in values for word in ("--set", value)]
    if more is not None:
        given += ["--set-json", json.dumps(more)]
    return _rendered("--kube-version", version, *given)


def expressions(dashboard: Mapping[str, Any]) -> list[str]:
    """Every query of the dashboard in this ConfigMap."""
    found = json.loads(dashboard["data"]["muster.json"])
    return [target["expr"] for panel in found["panels"] for target in panel["targets"]]


def _rendered(*words: str) -> list[dict[str, Any]]:
    text = helm("template", "muster", str(CHART), "--namespace", "muster-system", *words)
    return [one for one in yaml.safe_load_all(text) if one]


class RunningRelease:
    """An API server that knows the chart's kinds, and of objects ``there`` alone, by their path.

    ``with RunningRelease(there) as release: release.rendered(…)``: what ``lookup`` finds there.
    """

    def __init__(self, there: Mapping[str, Any]) -> None:
        kinds = defaultdict(set)
        for one in rendered("etcd.backup.enabled=true", "etcd.backup.claim=c"):
            kinds[one["apiVersion"]].add(one["kind"])
        kinds["v1"].add("PersistentVolumeClaim")
        kinds["batch/v1"].add("Job")
        kinds["scheduling.k8s.io/v1"].add("PriorityClass")
        self._pages: dict[str, Any] = {
            "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {
                "kind": "APIGroupList",
                "groups": [
                    {"name": name.partition("/")[0], "versions": [version]}
                    for name in kinds
                    if "/" in name
                    for version in [{"groupVersion": name, "version": name.rpartition("/")[2]}]
                ],
            },
            **{
                f"/apis/{name}" if "/" in name else f"/api/{name}": {
                    "kind": "APIResourceList",
                    "groupVersion": name,
                    "resources": [
                        {
                            **{"name": f"{kind.lower()}s", "kind": kind, "verbs": ["get", "list"]},
                            "namespaced": kind not in _OF_THE_CLUSTER,
                        }
                        for kind in sorted(found)
                    ],
                }
                for name, found in kinds.items()
            },
            **there,
        }

    def __enter__(self) -> Self:
        pages = self._pages

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = pages.get(self.path.partition("?")[0])
                missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
                body = json.dumps(page or missing).encode()
                self.send_response(200 if page else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def rendered(self, *values: str) -> list[dict[str, Any]]:
        """Render the chart as ``helm upgrade`` does; raises ``HelmFailed``."""
        address = f"http://127.0.0.1:{self._server.server_port}"
        words = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", address)
        return _rendered(*words, *(word for value in values for word in ("--set", value)))


_OF_THE_CLUSTER = {
    *("ClusterRole", "ClusterRoleBinding", "MutatingWebhookConfiguration", "PriorityClass")
}


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Every pod spec, with the name of its object."""
    for one in objects:
        spec: Any = one.get("spec", {})
        for word in ("jobTemplate", "spec", "template", "spec"):
            spec = spec.get(word, spec)
        if "containers" in spec:
            yield f"{one['kind']}/{one['metadata']['name']}", spec


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """All objects of a kind."""
    return [one for one in objects if one["kind"] == kind]


def command_of(objects: list[dict[str, Any]], kind: str = "Deployment") -> list[str]:
    """The command of the only container of the only object of a kind: the controller's, if none."""
    (found,) = of_kind(objects, kind)
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return list(container["command"])


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The one object of a kind with this name."""
    (found,) = [one for one in of_kind(objects, kind) if one["metadata"]["name"] == name]
    return found
