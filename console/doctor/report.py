# SPDX-License-Identifier: Apache-2.0
"""The doctor's measurements, before any judgement, and the result of one check. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from agent.verdict.states import Level
from agent.verdict.view import JobView
from rdzv.keys import JobKeys
from rdzv.store import StoreStatus

WORST_FIRST: Sequence[Level] = ("fault", "warning", "note", "ok")


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """One endpoint's answer. ``refused``: it answers, but denies access.

    ``reads_s`` is empty if no read came back; otherwise it includes the time spent on a read that
    failed or was given up.
    """

    endpoint: str
    status: StoreStatus | None = None
    error: str = ""
    refused: bool = False
    reads_s: tuple[float, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether the endpoint answers at all, be it with a refusal."""
        return self.status is not None or self.refused

    @property
    def away(self) -> bool:
        """Whether no read succeeded there, for another reason than missing rights."""
        return bool(self.error) and not self.reads_s and not self.refused


@dataclass(frozen=True, slots=True)
class RightsReport:
    """The result of a probe under the job's prefix: the steps done, the failed one, its error.

    ``write_s`` is the duration of a write, ``watch_s`` the time from its start until the watch
    showed it.
    """

    done: tuple[str, ...] = ()
    failed: str = ""
    error: str = ""
    write_s: float | None = None
    watch_s: float | None = None


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """One member of the cluster, as the cluster lists it."""

    member_id: int
    name: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured.

    ``members``, ``authenticated``, ``job`` and ``compacted`` (whether any of the history was) are
    None if the store does not tell. ``encrypted``: the connections use TLS; ``local``: they stay
    on this machine. ``others``: the jobs that the store has, if it does not have this one.
    """

    endpoints: tuple[EndpointReport, ...]
    rights: RightsReport
    members: tuple[EtcdMember, ...] | None = None
    authenticated: bool | None = None
    compacted: bool | None = None
    job: JobView | None = None
    others: tuple[JobKeys, ...] = ()
    encrypted: bool = False
    local: bool = False
    now_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding with, unless it is in order, its remedy."""

    check: str
    level: Level
    sentence: str
    remedy: str = ""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level; those of one level stay in order."""
    return sorted(findings, key=lambda finding: WORST_FIRST.index(finding.level))


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
