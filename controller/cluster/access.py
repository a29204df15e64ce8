# SPDX-License-Identifier: Apache-2.0
"""Access to the API server: by a kubeconfig, or as a pod of the cluster."""

from __future__ import annotations

from collections.abc import Mapping

from controller.cluster.in_cluster import FOLDER, ClusterAccess
from controller.cluster.kubeconfig import VARIABLE, KubeconfigAccess

Access = ClusterAccess | KubeconfigAccess


def access_of(
    environ: Mapping[str, str], kubeconfig: str | None = None, context: str | None = None
) -> Access:
    """Return the access by the kubeconfig; in a pod without one, the pod's own.

    Raises ``ConfigError``.
    """
    named = kubeconfig or context or environ.get(VARIABLE)
    if not named and (FOLDER / "token").is_file():
        return ClusterAccess.of(environ)
    return KubeconfigAccess.of(environ, kubeconfig, context)
