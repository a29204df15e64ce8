# SPDX-License-Identifier: Apache-2.0
"""What the doctor has seen of a store and a job, before anybody has judged it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rdzv.records.history import HistoryEntry
from rdzv.store import StoreStatus


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """What one endpoint answered. ``refused``: it is there, and does not let us in.

    ``reads_s`` is empty if no read came back; else it has the one as well that was given up.
    """

    endpoint: str
    status: StoreStatus | None = None
    error: str = ""
    refused: bool = False
    reads_s: tuple[float, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether anybody answers there."""
        return self.status is not None or self.refused

    @property
    def away(self) -> bool:
        """Whether nothing can be read there, and not for want of rights."""
        return bool(self.error) and not self.reads_s and not self.refused


@dataclass(frozen=True, slots=True)
class RightsReport:
    """What a probe under the job's prefix could do: the steps done, and what stopped it.

    ``write_s`` is how long a write took, ``watch_s`` from its start until the watch showed it.
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
class JobReport:
    """The job that was named. ``generation`` is None where the store has no such job."""

    namespace: str
    name: str
    generation: int | None = None
    members: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured.

    ``members``, ``authenticated``, ``job`` and ``compacted``, whether any of the history was, are
    None where the store does not tell. ``encrypted``: the connections are; ``local``: they stay on
    this machine.
    """

    endpoints: tuple[EndpointReport, ...]
    rights: RightsReport
    members: tuple[EtcdMember, ...] | None = None
    authenticated: bool | None = None
    compacted: bool | None = None
    job: JobReport | None = None
    encrypted: bool = False
    local: bool = False
    history: tuple[HistoryEntry, ...] = ()
    now_unix_s: float = 0.0
