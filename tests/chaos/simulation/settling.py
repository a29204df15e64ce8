# SPDX-License-Identifier: Apache-2.0
"""Whether everything has come right: members, rounds, drains."""

from __future__ import annotations

from rdzv.listing import decide
from tests.chaos.simulation.invariants import Invariants
from tests.chaos.simulation.pods import SimulatedJob


def unsettled(job: SimulatedJob, invariants: Invariants, *, trains: bool) -> str | None:
    """Say what is not as it should be once all faults are over, or None.

    ``trains``: there are torchruns and ranks.
    """
    why = _members(job, invariants) or _drains(job, invariants)
    return why or (_rounds(job, invariants) if trains else None)


def _members(job: SimulatedJob, invariants: Invariants) -> str | None:
    snapshot = invariants.snapshot
    listing = decide(snapshot)
    known = {member.pod_uid for member in (*listing.listed, *listing.standby)}
    for pod in job.present():
        if pod.terminating:
            return f"{pod.name} has not gone yet"
        if pod.sidecar is None or pod.sidecar.fenced:
            return f"{pod.name} has no sidecar that works"
        if pod.pod_uid not in known:
            return f"{pod.name} is not listed"
        if pod.sidecar.mirror.revision < job.engine.revision:
            return f"the mirror of {pod.name} is behind"
        if dict(pod.sidecar.mirror.kvs) != dict(invariants.truth.kvs):
            return f"the mirror of {pod.name} is not what the store holds"
    if len(snapshot.members) != len(job.present()):
        return "somebody who is gone is still a member"
    return None


def _drains(job: SimulatedJob, invariants: Invariants) -> str | None:
    for drain in invariants.snapshot.drains.values():
        if not drain.outcome:
            return f"the drain of {drain.member} goes on"
    return None


def _rounds(job: SimulatedJob, invariants: Invariants) -> str | None:
    listed = {member.name for member in decide(invariants.snapshot).listed}
    if len(listed) < job.shape.least:
        return None
    current = invariants.rounds.round
    frozen = {seat.member for seat in current.frozen}
    if not current.complete or current.closed or frozen != listed:
        return f"the round is {current}, and {sorted(listed)} are listed"
    for name in sorted(listed):
        torchrun = job.pods[name].torchrun
        if torchrun is None or torchrun.round != current.number or torchrun.rank is None:
            return f"{name} is not in round {current.number}"
        trained = torchrun.rank.world.trained.get(name, -1)
        if torchrun.rank.ended or trained < torchrun.rank.world.start + SETTLED_STEPS:
            return f"{name} does not train yet"
    commit = invariants.snapshot.commit
    if commit is not None and commit.round == current.number and commit.phase in PASSING:
        return f"the commit is in {commit.phase}"
    return None


SETTLED_STEPS = 2
PASSING = ("hold", "commit", "done")
