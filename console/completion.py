# SPDX-License-Identifier: Apache-2.0
"""Names of jobs and pods, as the shell completes them: soon, or none, and never an error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

import click

from console.context_file import defaults
from console.running import running
from console.whereabouts import ClusterOptions, is_cluster_known

T = TypeVar("T")

PATIENCE_S = 2.0
"""Time until the shell gets the names that are known by then: a user waits for each of them."""


def job_names(ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Return the jobs of ``muster local`` here and of the cluster's namespace that begin so."""
    local = [job.job for job in _or_nothing(running)]
    return _beginning(begun, [*local, *_in_time(lambda: _of_cluster(ctx, pods=False))])


def pod_names(ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Return the pods of the job, or of all jobs of the namespace, that begin so."""
    return _beginning(begun, _in_time(lambda: _of_cluster(ctx, pods=True)))


def _beginning(begun: str, names: list[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(begun)})


def _of_cluster(ctx: click.Context, *, pods: bool) -> list[str]:
    params = ctx.params
    if params.get("etcd_endpoints") or os.environ.get("MUSTER_ETCD_ENDPOINTS"):
        return []
    options = ClusterOptions(*(params.get(one) for one in ("kubeconfig", "context", "namespace")))
    options = options.completed(defaults(os.environ), os.environ)
    if not (options.kubeconfig or options.context or is_cluster_known(os.environ)):
        return []
    # Late, as it needs the client of the API server, and only here.
    names_in: Callable[..., list[str]] = import_module("console.remote.pods").names_in
    job = params.get("named") or params.get("job") or ""
    return names_in(options, job=str(job) if pods else "", pods=pods, timeout_s=PATIENCE_S)


def _or_nothing(look: Callable[[], list[T]]) -> list[T]:
    try:
        return look()
    except Exception:
        # A shell would print it amid what its user types; the command itself says what is wrong.
        return []


def _in_time(look: Callable[[], list[str]]) -> list[str]:
    """Return what ``look`` finds within ``PATIENCE_S``; it is left behind if it takes longer."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(_or_nothing(look)), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return list(found)
