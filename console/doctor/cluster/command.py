# SPDX-License-Identifier: Apache-2.0
"""``muster doctor --cluster``: reaches the cluster by a kubeconfig, or as a pod of the cluster."""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import UTC, datetime

from console.doctor.cluster.examine import examine
from console.doctor.cluster.findings import findings_of
from console.doctor.finding import Finding
from controller.cluster.api import ClusterApi
from controller.cluster.in_cluster import FOLDER, ClusterAccess
from controller.cluster.kubeconfig import VARIABLE, KubeconfigAccess


def cluster_findings(kubeconfig: str | None) -> list[Finding]:
    """Examine the cluster and return the findings; raises ``ConfigError`` and ``ClusterError``."""
    logging.getLogger("controller").setLevel(logging.ERROR)  # its warnings are findings
    in_pod = kubeconfig is None and VARIABLE not in os.environ and (FOLDER / "token").is_file()
    access = ClusterAccess.of(os.environ) if in_pod else KubeconfigAccess.of(os.environ, kubeconfig)
    return asyncio.run(_findings(access))


async def _findings(access: ClusterAccess | KubeconfigAccess) -> list[Finding]:
    async with ClusterApi(access) as api:
        return findings_of(await examine(api, lambda: datetime.now(UTC)))
