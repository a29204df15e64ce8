# SPDX-License-Identifier: Apache-2.0
"""Access to the API server from within a pod: the files that the kubelet mounts."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rdzv.errors import ConfigError

FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The URL of the API server, and the folder with the pod's token and the cluster's authority.

    The kubelet renews the token, so it is read for each call.
    """

    url: str
    folder: Path

    @classmethod
    def of(cls, environ: Mapping[str, str], folder: Path = FOLDER) -> ClusterAccess:
        """Read the access from the environment; raises ``ConfigError`` outside of a cluster."""
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

    @property
    def namespace(self) -> str:
        """The pod's namespace."""
        return (self.folder / "namespace").read_text(encoding="utf-8").strip()

    def token(self) -> str:
        """Read the current token."""
        return (self.folder / "token").read_text(encoding="utf-8").strip()

    def trusted(self) -> ssl.SSLContext:
        """Build a TLS context that trusts the cluster's authority only."""
        return ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
