# SPDX-License-Identifier: Apache-2.0
"""The members of the chart's etcd: killed, replaced, and what they show to their clients."""

from __future__ import annotations

import base64
import json
import os
import signal
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from controller.certificate_keeper import pair_in, with_pair
from controller.certificates import due, make_members
from tests.support.cluster.chart_release import NAMESPACE, RELEASE
from tests.support.cluster.lab import Kubelab, Object
from tests.support.waiting import wait_until

ETCD = f"{RELEASE}-etcd"
PATIENCE_S = 180.0
LONG_AGO = timedelta(days=600)
"""A members' certificate of then is due, and still good."""

Life = tuple[str, int]
"""The pod's UID, and how often its container was started again."""


class Members:
    """Of a release with so many members."""

    def __init__(self, lab: Kubelab, count: int) -> None:
        self.lab = lab
        self.names = [f"{ETCD}-{number}" for number in range(count)]

    def lives(self) -> dict[str, Life]:
        """The present life of each member that is ready."""
        found = {}
        for pod in self.lab.pods(NAMESPACE, "app.kubernetes.io/component=etcd"):
            for status in pod["status"].get("containerStatuses", []):
                if status["ready"] and "deletionTimestamp" not in pod["metadata"]:
                    life = (pod["metadata"]["uid"], status["restartCount"])
                    found[pod["metadata"]["name"]] = life
        return found

    def until_ready(self) -> dict[str, Life]:
        """Wait until all are ready; return their lives."""
        self.until_in_another_life({})
        return self.lives()

    def until_in_another_life(self, before: dict[str, Life], *names: str) -> None:
        """Wait until these have ended and all are ready."""

        def so() -> bool:
            lives = self.lives()
            return lives.keys() == set(self.names) and all(
                lives[name] != before[name] for name in names
            )

        wait_until(so, PATIENCE_S, f"all members are ready, in another life: {', '.join(names)}")

    def kill(self, name: str) -> None:
        """End its process as the kernel would, without a word."""
        os.kill(process_of(name), signal.SIGKILL)

    def delete(self, name: str) -> None:
        """Delete its pod without any grace; the StatefulSet makes another."""
        how = ("--force", "--grace-period=0", "--wait=false")
        self.lab.kubectl("-n", NAMESPACE, "delete", "pod", name, *how)

    def age_certificate(self) -> None:
        """Put a certificate in place that was made long ago, by the same authority."""
        secret = self._secret()
        held, then = pair_in(secret), datetime.now(UTC) - LONG_AGO
        assert held is not None
        hosts = ["localhost", *(f"{one}.{NAMESPACE}.svc" for one in (ETCD, f"*.{ETCD}"))]
        hosts += [f"{name}.{ETCD}.{NAMESPACE}.svc" for name in self.names]
        aged = make_members(held, hosts, then)
        assert aged.authority == held.authority
        assert "it ends at" in (due(aged, hosts, datetime.now(UTC)) or "")
        changed = json.dumps(with_pair(secret, aged))
        self.lab.kubectl("replace", "-f", "-", stdin=changed)

    def certificate(self) -> bytes:
        """The certificate in the Secret, as DER."""
        text = base64.b64decode(self._secret()["data"]["tls.crt"])
        return ssl.PEM_cert_to_DER_cert(text.decode())

    def shown(self) -> set[bytes]:
        """What the members show to who connects to them now."""
        found = set()
        for name in self.names:
            address = self.lab.get(NAMESPACE, "pod", name)["status"]["podIP"]
            found.add(
                ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((address, 2379), timeout=10))
            )
        return found

    def _secret(self) -> Object:
        return self.lab.get(NAMESPACE, "secret", ETCD)


def process_of(member: str) -> int:
    """The process of a member, as this machine sees it, which is all of the lab."""
    words = f"--name={member}".encode()
    (found,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if words in _read(path).split(b"\0")
    ]
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has ended meanwhile
