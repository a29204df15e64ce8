# SPDX-License-Identifier: Apache-2.0
"""The doctor's measurements of a store and a job, before any judgement. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from agent.verdict.view import JobView
from rdzv.keys import JobKeys
from rdzv.store import StoreStatus


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
