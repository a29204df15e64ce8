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
from controller.cluster.access import ClusterAccess, access_of
from controller.cluster.api import ClusterApi


def cluster_findings(kubeconfig: str | None, context: str | None) -> list[Finding]:
    """Examine the cluster and return the findings; raises ``ConfigError`` and ``ClusterError``."""
    logging.getLogger("controller").setLevel(logging.ERROR)  # its warnings are findings
    return asyncio.run(_findings(access_of(os.environ, kubeconfig, context)))


async def _findings(access: ClusterAccess) -> list[Finding]:
    async with ClusterApi(access) as api:
        return findings_of(await examine(api, lambda: datetime.now(UTC)))
