# SPDX-License-Identifier: Apache-2.0
"""etcd, a real API server and a controller manager that creates the pods of Jobs; no nodes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from sidecar_image.engine import toolchain
from tests.support.ports import free_ports

READY_S = 120.0
END_S = 20.0
CALL_TIMEOUT_S = 60
QPS = 20
"""Calls per second that the controller manager may make: its default."""


class ApiServer:
    """``with ApiServer(folder) as server``: its token and authority are files of ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._then = ExitStack()
        ports = free_ports(3)
        self.url = f"https://127.0.0.1:{ports[0]}"
        self._ports = ports

    def __enter__(self) -> ApiServer:
        try:
            self._up()
        except BaseException:
            self._then.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._then.close()

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a process that is terminated together with the server."""
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        self._then.callback(_end, process)
        return process

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make one call and return the parsed JSON answer."""
        content = None if body is None else json.dumps(body).encode()
        return json.loads(self._answer(method, path, content))

    def text(self, path: str) -> str:
        """Read a page as text."""
        return self._answer("GET", path, None).decode()

    def last_lines(self) -> str:
        """Return the ends of all logs, for an error message."""
        ends = ((path.name, path.read_text()[-500:]) for path in self._folder.glob("*.log"))
        return "\n".join(f"{name}: {end}" for name, end in ends)

    def _up(self) -> None:
        folder, (port, client, peer) = self._folder, self._ports
        programs, etcd = toolchain("kubelab-programs"), toolchain("etcd")
        token = secrets.token_hex(16)
        (folder / "token").write_text(token)
        (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
        key, public = _keys(folder)
        members = f"http://127.0.0.1:{peer}"
        self.start(
            "etcd",
            [
                *(str(etcd / "etcd"), f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"),
                f"--listen-client-urls=http://127.0.0.1:{client}",
                f"--advertise-client-urls=http://127.0.0.1:{client}",
                *(f"--listen-peer-urls={members}", f"--initial-advertise-peer-urls={members}"),
                f"--initial-cluster=default={members}",
            ],
        )
        self.start(
            "api-server",
            [
                str(programs / "kube-apiserver"),
                f"--etcd-servers=http://127.0.0.1:{client}",
                *("--bind-address=127.0.0.1", f"--secure-port={port}"),
                *(f"--cert-dir={folder}", f"--token-auth-file={folder / 'tokens.csv'}"),
                *("--authorization-mode=RBAC", "--endpoint-reconciler-type=none"),
                *("--service-cluster-ip-range=10.96.0.0/16", "--advertise-address=127.0.0.1"),
                "--disable-admission-plugins=ServiceAccount",
                "--service-account-issuer=https://kubernetes.default.svc",
                *(f"--service-account-key-file={public}",),
                f"--service-account-signing-key-file={key}",
            ],
        )
        self._until_ready()
        shutil.copy(folder / "apiserver.crt", folder / "ca.crt")
        config = folder / "kubeconfig"
        authority = {"server": self.url, "certificate-authority": str(folder / "ca.crt")}
        context = {"cluster": "bench", "user": "admin"}
        config.write_text(
            json.dumps(
                {
                    **{"apiVersion": "v1", "kind": "Config", "current-context": "bench"},
                    "clusters": [{"name": "bench", "cluster": authority}],
                    "users": [{"name": "admin", "user": {"token": token}}],
                    "contexts": [{"name": "bench", "context": context}],
                }
            )
        )
        self.start(
            "controller-manager",
            [
                *(str(programs / "kube-controller-manager"), f"--kubeconfig={config}"),
                *("--leader-elect=false", "--secure-port=0", "--controllers=job-controller"),
                *(f"--kube-api-qps={QPS}", f"--kube-api-burst={2 * QPS}"),
            ],
        )

    def _until_ready(self) -> None:
        deadline_s = monotonic() + READY_S
        while True:
            try:
                self.text("/readyz")
                self.call("GET", "/api/v1/namespaces/default")
                return
            except OSError as error:
                if monotonic() > deadline_s:
                    raise AssertionError(f"not ready: {error}\n{self.last_lines()}") from error
                sleep(0.2)

    def _answer(self, method: str, path: str, content: bytes | None) -> bytes:
        context = ssl.create_default_context(cafile=str(self._folder / "apiserver.crt"))
        token = (self._folder / "token").read_text()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, content, headers, method=method)
        with urllib.request.urlopen(request, context=context, timeout=CALL_TIMEOUT_S) as answer:
            return bytes(answer.read())


def _keys(folder: Path) -> tuple[Path, Path]:
    made = rsa.generate_private_key(65537, 2048)
    key, public = folder / "accounts.key", folder / "accounts.pub"
    key.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    form = PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(made.public_key().public_bytes(Encoding.PEM, form))
    return key, public


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
