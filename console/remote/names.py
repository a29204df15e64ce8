# SPDX-License-Identifier: Apache-2.0
"""Names of jobs and of their pods alone, by one short call."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from console.remote.pods import NAMES, PAGE
from console.remote.reach import cluster
from console.whereabouts import ClusterOptions
from controller.cluster import paths
from controller.cluster.api import ClusterApi
from injection.job_label import job_label
from injection.settings import LABEL


def names_in(options: ClusterOptions, *, job: str, pods: bool, timeout_s: float) -> list[str]:
    """Return the names of jobs or of ``pods`` in the namespace, those of one job if it is given."""
    return asyncio.run(_names_in(options, job=job, pods=pods, timeout_s=timeout_s))


async def _names_in(
    options: ClusterOptions, *, job: str, pods: bool, timeout_s: float
) -> list[str]:
    async with asyncio.timeout(timeout_s), cluster(options) as api:
        return await names(api, job=job, pods=pods, timeout_s=timeout_s)


async def names(api: ClusterApi, *, job: str, pods: bool, timeout_s: float) -> list[str]:
    """Return the names that one page of a list has."""
    selector = quote(f"{LABEL}={job_label(job)}" if job else LABEL)
    path = f"{paths.core(api.namespace, 'pods')}?labelSelector={selector}&limit={PAGE}"
    page = await api.get(path, timeout_s, accept=NAMES)
    found = [one["metadata"] for one in page.get("items") or []]
    return [one["name"] if pods else one["labels"][LABEL] for one in found]
