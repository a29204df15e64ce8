# SPDX-License-Identifier: Apache-2.0
"""etcd, API server, controller manager, scheduler and CoreDNS, as processes of this machine."""

from __future__ import annotations

import json
import secrets
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

from kubelab.errors import LabError
from kubelab.layout import (
    API_URL,
    CLUSTER_DOMAIN,
    ETCD_PEER_URL,
    ETCD_URL,
    HOST_ADDRESS,
    KUBECONFIG,
    PROGRAMS,
    SERVICE_SUBNET,
    STATE,
)
from kubelab.processes import check, last_lines, pid_of, start

PKI = STATE / "pki"
TOKENS = STATE / "tokens.csv"
KUBELET_CLIENT = PKI / "kubelet-client"
"""Path of the key and the self-signed certificate that authenticate the API server to kubelets."""

PATIENCE_S = 180.0
"""Time limit for the cluster's own next step, on a busy machine."""

PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns")

_COREFILE = f"""\
. {{
    bind {HOST_ADDRESS}
    errors
    kubernetes {CLUSTER_DOMAIN} {{
        kubeconfig {KUBECONFIG}
        ttl 1
    }}
}}
"""


def up(etcd: Path) -> None:
    """Start every component that does not run, and wait until the API server is ready."""
    make_keys()
    start(
        "etcd",
        [
            str(etcd / "etcd"),
            f"--data-dir={STATE / 'etcd'}",
            f"--listen-client-urls={ETCD_URL}",
            f"--advertise-client-urls={ETCD_URL}",
            f"--listen-peer-urls={ETCD_PEER_URL}",
            f"--initial-advertise-peer-urls={ETCD_PEER_URL}",
            f"--initial-cluster=default={ETCD_PEER_URL}",
            # A lab is always created anew, never recovered.
            "--unsafe-no-fsync",
        ],
    )
    start(
        "kube-apiserver",
        [
            str(PROGRAMS / "kube-apiserver"),
            f"--etcd-servers={ETCD_URL}",
            f"--bind-address={HOST_ADDRESS}",
            f"--advertise-address={HOST_ADDRESS}",
            f"--cert-dir={PKI}",
            f"--token-auth-file={TOKENS}",
            "--authorization-mode=RBAC",
            "--allow-privileged",
            "--endpoint-reconciler-type=none",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={KUBELET_CLIENT}.crt",
            f"--kubelet-client-key={KUBELET_CLIENT}.key",
            # Webhooks and aggregated APIs are reached at their pods: nothing serves cluster IPs.
            "--enable-aggregator-routing",
            f"--service-cluster-ip-range={SERVICE_SUBNET}",
            f"--service-account-issuer=https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
            f"--service-account-key-file={PKI / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={PKI / 'service-accounts.key'}",
        ],
    )
    _wait_until_ready(180.0)
    start(
        "kube-controller-manager",
        [
            str(PROGRAMS / "kube-controller-manager"),
            f"--kubeconfig={KUBECONFIG}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--service-account-private-key-file={PKI / 'service-accounts.key'}",
            f"--root-ca-file={PKI / 'apiserver.crt'}",
            # A lost node has to be detected within a test's time limit.
            "--node-monitor-period=2s",
            "--node-monitor-grace-period=16s",
        ],
    )
    start(
        "kube-scheduler",
        [
            str(PROGRAMS / "kube-scheduler"),
            f"--kubeconfig={KUBECONFIG}",
            "--leader-elect=false",
            "--secure-port=0",
        ],
    )
    (STATE / "Corefile").write_text(_COREFILE)
    start("coredns", [str(PROGRAMS / "coredns"), "-conf", str(STATE / "Corefile")])


def make_keys() -> None:
    """Create the missing ones of the keys, certificates and tokens of the components."""
    PKI.mkdir(parents=True, exist_ok=True)
    key, public = PKI / "service-accounts.key", PKI / "service-accounts.pub"
    if not public.exists():
        aside = PKI / "service-accounts.pub.part"
        check(["openssl", "genrsa", "-out", str(key), "2048"])
        check(["openssl", "rsa", "-in", str(key), "-pubout", "-out", str(aside)])
        aside.replace(public)
    certificate = PKI / "kubelet-client.crt"
    if not certificate.exists():
        aside = PKI / "kubelet-client.crt.part"
        names = ["-keyout", f"{KUBELET_CLIENT}.key", "-out", str(aside)]
        subject = ["-subj", "/O=system:masters/CN=kube-apiserver", "-days", "3650"]
        check(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, *subject])
        aside.replace(certificate)
    if not TOKENS.exists():
        _keep_secret(TOKENS, f"{secrets.token_hex(24)},admin,admin,system:masters\n")


def _keep_secret(path: Path, text: str) -> None:
    """Write a file for root only; renamed into place, so that it is never incomplete."""
    aside = path.with_name(f"{path.name}.part")
    aside.touch(mode=0o600)
    aside.write_text(text)
    aside.replace(path)


def _token() -> str:
    return TOKENS.read_text().partition(",")[0]


def _wait_until_ready(timeout_s: float) -> None:
    """Wait until the API server is ready by its own certificate; write the kubeconfig."""
    deadline_s = time.monotonic() + timeout_s
    certificate = PKI / "apiserver.crt"
    said = "nothing"
    while time.monotonic() < deadline_s:
        if pid_of("kube-apiserver") is None:
            raise LabError(f"the API server ended:\n{last_lines('kube-apiserver')}")
        try:
            context = ssl.create_default_context(cafile=str(certificate))
            request = urllib.request.Request(
                f"{API_URL}/readyz", headers={"Authorization": f"Bearer {_token()}"}
            )
            with urllib.request.urlopen(request, context=context, timeout=5):
                _write_kubeconfig(certificate)
                return
        except OSError as error:
            said = str(error)
            time.sleep(0.2)
    raise LabError(f"the API server is not ready after {timeout_s:g} s; it says: {said}")


def _write_kubeconfig(certificate: Path) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "kubelab",
                "cluster": {"server": API_URL, "certificate-authority": str(certificate)},
            }
        ],
        "users": [{"name": "admin", "user": {"token": _token()}}],
        "contexts": [{"name": "kubelab", "context": {"cluster": "kubelab", "user": "admin"}}],
        "current-context": "kubelab",
    }
    _keep_secret(KUBECONFIG, json.dumps(config, indent=2))


def kubectl(*arguments: str, timeout_s: float = 60.0, stdin: str | None = None) -> str:
    """Run kubectl against the lab and return what it printed."""
    argv = [str(PROGRAMS / "kubectl"), f"--kubeconfig={KUBECONFIG}", *arguments]
    return check(argv, timeout_s=timeout_s, stdin=stdin)


def wait_until(what: str, *arguments: str, stdin: str | None = None) -> str:
    """Repeat a kubectl command until it succeeds and prints something; return that.

    Raises LabError after ``PATIENCE_S``.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            if printed := kubectl(*arguments, stdin=stdin).strip():
                return printed
            said = "nothing yet"
        except LabError as error:
            said = str(error)
        if time.monotonic() > deadline_s:
            raise LabError(f"not within {PATIENCE_S:g} s: {what}; the last answer was: {said}")
        time.sleep(0.3)
