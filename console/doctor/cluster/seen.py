# SPDX-License-Identifier: Apache-2.0
"""The doctor's observations of a cluster, before any judgement. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Hook:
    """A webhook that injects sidecars: its service, and whether the API server can verify it."""

    configuration: str
    namespace: str
    service: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class ChartPart:
    """The controller or etcd: its wanted and ready pods, their image, and the chart."""

    name: str
    wanted: int
    ready: int
    image: str
    chart: str


@dataclass(frozen=True, slots=True)
class Probe:
    """The outcome of creating a labelled pod in a dry run.

    ``error``: the reason why there is no answer. ``server_time``: the pod's creation, by the API
    server's clock; ``asked``: the start of the request, by this machine's.
    """

    injected: bool = False
    error: str = ""
    server_time: datetime | None = None
    asked: datetime | None = None


@dataclass(frozen=True, slots=True)
class AskingPod:
    """A pod that asks for a sidecar, or whose namespace does.

    ``sidecar``: the image of its sidecar; None if it has none. ``missing``: a Secret that it needs
    and that does not exist. ``immutable``: the controller's Secret that it uses, if a user has made
    that immutable.
    """

    namespace: str
    name: str
    phase: str
    sidecar: str | None
    missing: str = ""
    immutable: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything that was seen of a cluster at ``now``, by the clock of this machine.

    ``leaders``: the members of etcd that lead. ``certificates``: the end of validity of each, by
    Secret and key. ``secrets_left``: the number of Secrets that pods name but that were not read,
    as there are too many. ``renewed``: the last renewal of each node's lease, by that node's clock.
    ``unread``: the reason why something could not be read, by its check.
    """

    now: datetime
    server_version: str
    hooks: tuple[Hook, ...] = ()
    controllers: tuple[ChartPart, ...] = ()
    stores: tuple[ChartPart, ...] = ()
    leaders: tuple[str, ...] = ()
    certificates: Mapping[str, datetime] | None = None
    probe: Probe | None = None
    pods: tuple[AskingPod, ...] = ()
    secrets_left: int = 0
    renewed: Mapping[str, datetime] | None = None
    unread: Mapping[str, str] | None = None
