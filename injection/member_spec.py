# SPDX-License-Identifier: Apache-2.0
"""The specification of one template's member: from its settings, else from its object."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from injection import facts
from injection.kinds import Kind
from injection.launches import TUNNEL_PORT, bounds, line_of_job
from injection.settings import TABLE, TemplateSettings
from injection.workloads import Role, Workload
from launcher_shim.launcher import GivenSizes
from rdzv.errors import ConfigError

HTTP_PORT, RELAY_PORT = 9400, 29400
HOST_PORTS = range(20_000, 29_400, 2)
"""Ports on the node's network: below the ranges of node ports and of outgoing connections. Each
job has one of them and the next."""
HOST_TUNNEL_PORTS = range(15_000, 15_000 + len(HOST_PORTS))
"""Ports of central launchers' tunnels there, one for each job."""

_REQUIRED = {
    "job": "the object has no name of its own; all pods of a job have one in common",
    "min_nodes": "the fewest pods that the job can train with",
    "max_nodes": "the most pods that the job takes",
    "etcd_endpoints": "where the pods find etcd, as in etcd.default.svc:2379",
    "image": "the image of the sidecar",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The complete specification of a job's member: its settings, with what its object says."""

    settings: TemplateSettings
    kind: Kind
    job: str
    """Name of the job; with a ``job_name_label`` what all jobs of the template have in common: the
    name of the object which creates them, or the beginning of their own."""
    owner: str | None
    """Kind and group of the object that the job is named after; None if somebody has named it."""
    job_name_label: str | None
    """The pod's label that has the job's name; None if ``job`` is that name."""
    least: int
    """The fewest pods that the job can train with. More: a world that lost one may have to wait for
    another."""
    most: int
    """The most pods that the job takes; those beyond stand by."""
    sized_by_launch: bool
    """Whether the fewest and the most are those of a torchrun's or an accelerate's launch line."""
    policy: Mapping[str, Any]
    """Further values of the job's policy, by name; None for the sidecar's default."""
    slots: int
    """Worker processes in a pod."""
    http_port: int
    """Port of the sidecar's health, readiness and metrics, at the pod's address."""
    relay_port: int
    """Port of torchrun's rendezvous, on the loopback address."""
    on_host_network: bool
    """Whether the pod has its node's network: its ports are then the node's, and two pods of one
    job cannot be on one node."""
    role: Role | None
    """The pod's role beside a central launcher; None without one."""
    tunnel_port: int | None
    """Port of the sidecar's end of the launcher's tunnel; None without one."""


def demand(
    workload: Workload,
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    settings: TemplateSettings,
    role: Role | None = None,
) -> Demand:
    """Complete the settings from the object; raises ``ConfigError`` that names all faults.

    ``role`` is the pod's beside a central launcher.
    """
    kind = workload.known or Kind(())
    line = line_of_job(workload, container) if role is not None else GivenSizes()
    slots = settings.slots or _slots(workload, container, kind, line, role)
    # The name of a bare pod is not a job's name.
    name = settings.job or ("" if workload.is_pod else workload.name)
    name_label = None if settings.job else kind.job_name_label
    if not name and kind.name_label is not None:
        name, name_label = workload.prefix.rstrip("-."), kind.name_label
    nodes = None if role is not None else bounds(container)
    fewest, largest = nodes or (-(-(line.least or 0) // slots), (line.most or 0) // slots)
    least = settings.policy["min_nodes"] or facts.whole_number(workload.stated(kind.least))
    most = settings.policy["max_nodes"] or facts.whole_number(workload.stated(kind.most))
    sized_by_launch = nodes is not None and not (least or most)
    least, most = least or fewest, most or largest
    _refuse_faults(settings, name, least, most)
    on_host = facts.is_true(pod.get("hostNetwork"))
    place = _host_place(f"{settings.namespace or workload.namespace or 'default'}/{name}")
    port, tunnel_port = HOST_PORTS[place], HOST_TUNNEL_PORTS[place]
    return Demand(
        settings=settings,
        kind=kind,
        job=name,
        owner=None if settings.job else f"{workload.kind}.{workload.group}".rstrip("."),
        job_name_label=name_label,
        least=least,
        most=most,
        sized_by_launch=sized_by_launch,
        policy={**settings.policy, "min_nodes": least, "max_nodes": most},
        slots=slots,
        role=role,
        tunnel_port=None if role is None else tunnel_port if on_host else TUNNEL_PORT,
        http_port=settings.http_port or (port if on_host else HTTP_PORT),
        relay_port=settings.relay_port or (port + 1 if on_host else RELAY_PORT),
        on_host_network=on_host,
    )


def _refuse_faults(settings: TemplateSettings, name: str, least: int, most: int) -> None:
    """Raise ``ConfigError`` that names what is missing and what is wrong."""
    held = {
        "job": name,
        "min_nodes": least,
        "max_nodes": most,
        "etcd_endpoints": settings.etcd_endpoints,
        "image": settings.image,
    }
    faults = [
        f"{TABLE[key].flag} ({TABLE[key].variable}) is missing: {why}"
        for key, why in _REQUIRED.items()
        if not held[key]
    ]
    own = {key: getattr(settings, key) for key in TABLE if key not in settings.policy}
    given = {**own, **settings.policy}
    faults += TemplateSettings.faults(
        {**given, "min_nodes": least or 1, "max_nodes": most or least or 1}
    )
    if faults:
        raise ConfigError("\n".join(faults))


def _slots(
    workload: Workload,
    container: Mapping[str, Any],
    kind: Kind,
    line: GivenSizes,
    role: Role | None,
) -> int:
    """Return the worker processes in a pod; a launcher's accelerators are not its workers'."""
    given = [workload.stated(path) for path in kind.slots]
    if role is None:
        return facts.slots(container, given)
    slots = next(filter(None, map(facts.whole_number, given)), 0) or line.slots
    return slots or (facts.slots(container, []) if role == "worker" else 1)


def _host_place(name: str) -> int:
    """Return the index of a job's ports in the ranges of ports on the node's network."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % len(HOST_PORTS)
