# SPDX-License-Identifier: Apache-2.0
"""The specification of one template's member: from its settings, else from its object."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
    """The complete specification of a job's member."""

    job: str
    """Name of the job; with a ``job_name_label`` what all jobs of the template have in common: the
    name of the object which creates them, or the beginning of their own."""
    owner: str | None
    """Kind and group of the object that the job is named after; None if somebody has named it."""
    job_name_label: str | None
    """The pod's label that has the job's name; None if ``job`` is that name."""
    job_uid_label: str | None
    """The pod's label that has the UID of the object which lives as long as the job."""
    index_label: str | None
    """The pod's label that has its number in the job."""
    namespace: str | None
    """Namespace of the job in the store; None for the pod's."""
    least: int
    """The fewest pods that the job can train with. More: a world that lost one may have to wait for
    another."""
    most: int
    """The most pods that the job takes; those beyond stand by."""
    sized_by_launch: bool
    """Whether the fewest and the most are those of a torchrun's or an accelerate's launch line."""
    policy: Mapping[str, Any]
    """Further values of the job's policy, by name; None for the sidecar's default."""
    on_cut: str | None
    """The policy for ranks whose pod has had no lease for long; None for the sidecar's default.
    ``hold``: no step is trained that another world may train as well, and none for so long."""
    stuck_after_s: float | None
    """Time without a step after which ranks are asked for their stacks, in seconds; None for the
    sidecar's default. Shorter: a rank that hangs is named sooner, and so is one that is slow."""
    when_stuck: str | None
    """The policy for a rank that keeps its world from training; None for the sidecar's default."""
    warm: str | None
    """Whether workers start warm; None for the sidecar's default."""
    first_call_s: float | None
    """Time for which a world waits for a pod whose torchrun has never connected, in seconds; None
    for the sidecar's default. Longer: fewer worlds while pods come; shorter: the first trains
    sooner."""
    last_call_s: float | None
    """Time for which a world waits for a torchrun that was there before, in seconds; None for the
    sidecar's default. Longer: such a one is more often in it; shorter: the others train sooner."""
    endpoints: str
    """Members of the etcd cluster, separated by commas; with https:// for TLS."""
    image: str
    """Image of the sidecar."""
    pull_policy: str | None
    """Policy by which the kubelet pulls that image; None for Kubernetes' default."""
    user: int | Literal["none"]
    """User and group of the sidecar; ``none`` if the cluster chooses them."""
    secret: str | None
    """Secret with the certificates and credentials for etcd, mounted into the sidecar alone; None
    if etcd needs none."""
    secret_keys: tuple[str, ...]
    """Keys that this Secret has."""
    slots: int
    """Worker processes in a pod."""
    topology: tuple[str, ...]
    """Topology of the pod's machine, the most general part first; a part in braces is read from
    the pod. Empty if it is unknown."""
    http_port: int
    """Port of the sidecar's health, readiness and metrics, at the pod's address."""
    relay_port: int
    """Port of torchrun's rendezvous, on the loopback address."""
    on_host_network: bool
    """Whether the pod has its node's network: its ports are then the node's, and two pods of one
    job cannot be on one node."""
    endless: bool
    """Whether its containers are restarted however they end."""
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
    least = settings.policy["min_nodes"] or _count(workload.told(kind.least))
    most = settings.policy["max_nodes"] or _count(workload.told(kind.most))
    sized_by_launch = nodes is not None and not (least or most)
    least, most = least or fewest, most or largest
    _refuse_faults(settings, name, least, most)
    on_host = facts.is_true(pod.get("hostNetwork"))
    place = _host_place(f"{settings.namespace or workload.namespace or 'default'}/{name}")
    port, tunnel_port = HOST_PORTS[place], HOST_TUNNEL_PORTS[place]
    return Demand(
        job=name,
        owner=None if settings.job else f"{workload.kind}.{workload.group}".rstrip("."),
        job_name_label=name_label,
        job_uid_label=kind.job_uid_label,
        index_label=kind.index_label,
        namespace=settings.namespace,
        least=least,
        most=most,
        sized_by_launch=sized_by_launch,
        policy={**settings.policy, "min_nodes": least, "max_nodes": most},
        on_cut=settings.on_cut,
        stuck_after_s=settings.stuck_after_s,
        when_stuck=settings.when_stuck,
        warm=settings.warm,
        first_call_s=settings.first_call_s,
        last_call_s=settings.last_call_s,
        endpoints=",".join(settings.etcd_endpoints or ()),
        image=settings.image or "",
        pull_policy=settings.pull_policy,
        user=settings.user or "none",
        secret=settings.etcd_secret,
        secret_keys=settings.etcd_secret_keys or (),
        slots=slots,
        role=role,
        tunnel_port=None if role is None else tunnel_port if on_host else TUNNEL_PORT,
        topology=settings.topology or (),
        http_port=settings.http_port or (port if on_host else HTTP_PORT),
        endless=kind.endless,
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
    told = [workload.told(path) for path in kind.slots]
    if role is None:
        return facts.slots(container, told)
    said = next((_count(text) for text in told if _count(text)), None) or line.slots
    return said or (facts.slots(container, []) if role == "worker" else 1)


def _host_place(name: str) -> int:
    """Return the index of a job's ports in the ranges of ports on the node's network."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % len(HOST_PORTS)


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0
