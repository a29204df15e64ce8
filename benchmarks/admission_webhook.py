# SPDX-License-Identifier: Apache-2.0
"""One replica of the webhook, for an API server of this machine: ``URL FOLDER PORT``."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from agent.telemetry import logs
from controller.admission.injector import AdmissionMetrics, Injector
from controller.certificate_keeper import CertificateKeeper
from controller.cluster.access import access_of_pod
from controller.cluster.api import ClusterApi
from controller.config import defaults
from controller.process import application, serving

SETTINGS = ("image=example.org/muster-sidecar:0.2.0", "etcd-endpoints=etcd:2379")
NAME = "muster-controller"


async def run(url: str, folder: str, port: int) -> None:
    """Serve until a signal ends the process."""
    at = urlsplit(url)
    named = {
        "KUBERNETES_SERVICE_HOST": str(at.hostname),
        "KUBERNETES_SERVICE_PORT": str(at.port),
    }
    access = await asyncio.to_thread(access_of_pod, named, Path(folder))
    async with ClusterApi(access) as api:
        keeper = CertificateKeeper(
            api, "default", NAME, NAME, ("localhost",), lambda: datetime.now(UTC)
        )
        metrics = AdmissionMetrics()
        pages = application(Injector(api, defaults(SETTINGS), metrics), metrics, keeper.ready)
        async with serving(pages, "127.0.0.1", port, keeper.context):
            await keeper.run()


if __name__ == "__main__":
    logs.configure("json", {"component": "controller"})
    asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3])))
