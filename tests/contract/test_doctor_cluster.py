# SPDX-License-Identifier: Apache-2.0
"""``muster doctor --cluster`` before an API server: as a person with a kubeconfig reaches it."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner

from console.doctor.command import doctor
from controller.certificates import make_pair
from rdzv.errors import ClusterUnavailable, ConfigError
from tests.support.cluster_api import make_patient
from tests.support.store.certificates import Authority

NOW = datetime.now(UTC)
PAIR = make_pair(None, ("muster-controller.muster-system.svc",), NOW - timedelta(days=100))
META: dict[str, Any] = {"labels": {"helm.sh/chart": "muster-0.2.0"}}
SPEC = {"template": {"spec": {"containers": [{"image": "example.org/i:0.2.0"}]}}, "replicas": 1}
HOOK = {
    "name": "pods.inject.muster.dev",
    "clientConfig": {
        "caBundle": "eA==",
        "service": {"namespace": "muster-system", "name": "muster-controller"},
    },
}


def pod(name: str, *, injected: bool, phase: str = "Running") -> dict[str, Any]:
    first = [{"name": "muster", "image": "example.org/muster-sidecar:0.2.0"}] if injected else []
    volumes = [{"name": "muster-etcd", "secret": {"secretName": "digits-etcd"}}]
    return {
        "metadata": {"namespace": "team", "name": name},
        "spec": {"containers": [], "initContainers": first, "volumes": volumes},
        "status": {"phase": phase},
    }


LISTS: dict[str, list[Any]] = {
    "mutatingwebhookconfigurations": [{"metadata": {"name": "muster"}, "webhooks": [HOOK]}],
    "deployments": [
        {"metadata": {**META, "name": "muster-controller"}, "spec": SPEC, "status": {}}
    ],
    "statefulsets": [
        {"metadata": {**META, "name": "muster-etcd"}, "spec": SPEC, "status": {"readyReplicas": 1}}
    ],
    "secrets": [
        {
            "metadata": {"name": "muster-controller"},
            "data": {"tls.crt": base64.b64encode(PAIR.certificate).decode(), "tls.key": "eA=="},
        }
    ],
    "pods": [
        pod("a", injected=True, phase="Pending"),
        pod("b", injected=False),
        pod("c", injected=False, phase="Succeeded"),
    ],
    "namespaces": [],
    "leases": [
        {"metadata": {"name": "node-a"}, "spec": {"renewTime": f"{NOW:%Y-%m-%dT%H:%M:%S.%f}Z"}}
    ],
}


class Api(BaseHTTPRequestHandler):
    """Lists, one object a page, a version, and no Secret of a job."""

    forbidden: ClassVar[set[str]] = set()
    made_status: ClassVar[int] = 201

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        plural, query = url.path.rpartition("/")[2], parse_qs(url.query)
        if self.headers["Authorization"] != "Bearer t":
            self._answer(401, {"message": "who are you"})
        elif plural in self.forbidden:
            self._answer(403, {"message": "forbidden"})
        elif plural == "version":
            self._answer(200, {"gitVersion": "v1.36.3"})
        elif plural in LISTS:
            at = int(query.get("continue", ["0"])[0])
            following = str(at + 1) if at + 1 < len(LISTS[plural]) else ""
            items = LISTS[plural][at : at + 1]
            self._answer(200, {"metadata": {"continue": following}, "items": items})
        else:
            self._answer(404, {"message": "not there"})

    def do_POST(self) -> None:
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert parse_qs(urlsplit(self.path).query) == {"dryRun": ["All"]}
        made["metadata"]["creationTimestamp"] = f"{NOW:%Y-%m-%dT%H:%M:%SZ}"
        told = made if self.made_status < 400 else {"message": "failed calling webhook x"}
        self._answer(self.made_status, told)

    def _answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


@contextmanager
def api_server(authority: Authority) -> Iterator[str]:
    certificate, key = authority.server("api-server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    make_patient(monkeypatch)
    authority = Authority(tmp_path, "api")
    data = base64.b64encode(authority.pem).decode()
    with api_server(authority) as url:
        path = tmp_path / "config"
        path.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "clusters": [
                        {
                            "name": "k",
                            "cluster": {"server": url, "certificate-authority-data": data},
                        }
                    ],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                }
            )
        )
        yield path


def run(*arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(
        doctor, ["--cluster", "-o", "json", *arguments], standalone_mode=False
    )
    if done.exception is not None:
        raise done.exception
    return done.return_value, json.loads(done.stdout)


def test_a_cluster_is_examined(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, told = run("--kubeconfig", str(kubeconfig))
    assert (status, told["status"]) == (1, 1)
    found = {(one["check"], one["level"]): one["sentence"] for one in told["findings"]}
    assert ("controller", "fault") in found
    assert ("webhook", "fault") in found
    assert ("certificate", "fault") in found
    assert "1 of 1 member ready" in found["etcd", "ok"]
    assert "team/b" in found["injection", "warning"]
    assert "team/c" not in found["injection", "warning"]
    assert "digits-etcd" in found["access", "fault"]

    # What its user may not read is told, and the rest is examined.
    monkeypatch.setattr(Api, "forbidden", {"secrets", "leases"})
    _, told = run("--kubeconfig", str(kubeconfig))
    notes = [one["check"] for one in told["findings"] if one["level"] == "note"]
    assert notes == ["stores", "certificate", "clocks"]

    # Another webhook of the cluster that is down, and refuses every pod.
    monkeypatch.setattr(Api, "made_status", 500)
    _, told = run("--kubeconfig", str(kubeconfig))
    found = {(one["check"], one["level"]): one["sentence"] for one in told["findings"]}
    assert "failed calling webhook x" in found["webhook", "warning"]
    assert ("controller", "fault") in found


def test_without_rights_nothing_is_called_well(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Api, "forbidden", set(LISTS))
    _, told = run("--kubeconfig", str(kubeconfig))
    levels = {one["check"]: one["level"] for one in told["findings"]}
    assert levels == {"version": "ok", "chart": "warning", "injection": "note", "clocks": "note"}

    read = json.loads(kubeconfig.read_text())
    read["users"][0]["user"]["token"] = "expired"
    kubeconfig.write_text(json.dumps(read))
    with pytest.raises(ConfigError, match="does not know"):
        run("--kubeconfig", str(kubeconfig))


def test_what_is_wrong_with_a_kubeconfig_is_one_sentence(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("", "{}", "current-context: c\ncontexts: []\n", "{{", "- a\n"):
        broken = tmp_path / "broken"
        broken.write_text(text)
        with pytest.raises(ConfigError, match="--kubeconfig"):
            run("--kubeconfig", str(broken))
    with pytest.raises(ConfigError, match="cannot be read"):
        run("--kubeconfig", str(tmp_path / "none"))
    whole = kubeconfig.read_text()
    for text in ("eA==", "gA==", "ä"):
        read = json.loads(whole)
        read["clusters"][0]["cluster"]["certificate-authority-data"] = text
        kubeconfig.write_text(json.dumps(read))
        with pytest.raises(ConfigError, match=r"certificate|kubeconfig"):
            run("--kubeconfig", str(kubeconfig))
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", "echo it began >&2; echo log in again >&2; exit 3", "s3cret"],
    }
    for user, words in (({"exec": plugin}, "log in again"), ({"tokenFile": "none"}, "none")):
        read = json.loads(whole)
        read["users"][0]["user"] = user
        kubeconfig.write_text(json.dumps(read))
        with pytest.raises(ConfigError, match=words) as caught:
            run("--kubeconfig", str(kubeconfig))
        assert "s3cret" not in str(caught.value)
    read["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    read["users"][0]["user"] = {"token": "t"}
    kubeconfig.write_text(json.dumps(read))
    monkeypatch.setenv("KUBECONFIG", f"{kubeconfig}:")
    with pytest.raises(ClusterUnavailable):
        run()
