# SPDX-License-Identifier: Apache-2.0
"""What the doctor has seen of a cluster, before anybody has judged it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Hook:
    """A webhook that gives pods their sidecar: where it is served, and whether it is trusted."""

    configuration: str
    namespace: str
    service: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class ChartPart:
    """The controller, or etcd: how many of its pods are ready, what they are, of which chart."""

    name: str
    wanted: int
    ready: int
    image: str
    chart: str


@dataclass(frozen=True, slots=True)
class Probe:
    """What became of a labelled pod that was made in a dry run.

    ``error``: why there is no answer. ``server_time``: when it was made, by the API server's clock;
    ``asked``: when the request began, by this machine's.
    """

    injected: bool = False
    error: str = ""
    server_time: datetime | None = None
    asked: datetime | None = None


@dataclass(frozen=True, slots=True)
class AskingPod:
    """A pod that asks for a sidecar, or whose namespace does.

    ``sidecar``: the image of the one that it has; None without. ``missing``: a Secret that it
    needs and that is not there. ``immutable``: the controller's Secret that it has, where somebody
    has made that so.
    """

    namespace: str
    name: str
    phase: str
    sidecar: str | None
    missing: str = ""
    immutable: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything that was seen at ``now``, by the clock of this machine.

    ``certificates``: the end of each, by Secret and key. ``secrets_left``: how many of the Secrets
    that pods name were not read, as they are too many. ``renewed``: when each node's lease was, by
    that node's clock. ``unread``: why something could not be looked at, by what it is.
    """

    now: datetime
    server_version: str
    hooks: tuple[Hook, ...] = ()
    controllers: tuple[ChartPart, ...] = ()
    stores: tuple[ChartPart, ...] = ()
    certificates: Mapping[str, datetime] | None = None
    probe: Probe | None = None
    pods: tuple[AskingPod, ...] = ()
    secrets_left: int = 0
    renewed: Mapping[str, datetime] | None = None
    unread: Mapping[str, str] | None = None
