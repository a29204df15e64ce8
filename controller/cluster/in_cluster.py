# SPDX-License-Identifier: Apache-2.0
"""How a pod reaches its API server: what the kubelet mounts into it, or a file for elsewhere."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rdzv.errors import ConfigError

FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Where the API server is, and the files by which both sides know each other.

    The kubelet renews the token: it is read again for each call.
    """

    url: str
    folder: Path

    @classmethod
    def of(cls, environ: Mapping[str, str], folder: Path = FOLDER) -> ClusterAccess:
        """Read what a kubelet tells its pods; raises ``ConfigError`` outside of a cluster."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ConfigError(
                "muster controller runs in a pod, whose KUBERNETES_SERVICE_HOST tells where the API"
                " server is: install the chart, charts/muster"
            )
        if not (folder / "token").is_file():
            raise ConfigError(
                f"{folder} has no token: give the pod a service account, with"
                " automountServiceAccountToken: true"
            )
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", folder)

    def token(self) -> str:
        """The token as it is now."""
        return (self.folder / "token").read_text(encoding="utf-8").strip()

    def trusted(self) -> ssl.SSLContext:
        """Trust the authority of the cluster, and no other."""
        return ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
