# SPDX-License-Identifier: Apache-2.0
"""Whether everything has come right: members, rounds, drains."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tests.simulation.invariants import Invariants
from tests.simulation.pods import Pod, SimulatedJob

SETTLED_STEPS = 2
PASSING = ("hold", "commit", "done")

PAUSES = 3
"""So often who fails in every world must have been left out: its pause has doubled twice."""

UNDISTURBED_S = 20.0
"""For so long a world must have trained beside launchers that crash: they are let in at times."""


def left_out(job: SimulatedJob, invariants: Invariants) -> Mapping[str, float]:
    """The pause of each member that worlds form without, in seconds."""
    terms, records = job.shape.quarantine, invariants.snapshot.quarantines
    marked = invariants.listing.quarantined
    return {name: terms.pause_s(records[name].pauses) for name in marked}


def unsettled(
    job: SimulatedJob,
    invariants: Invariants,
    *,
    trains: bool,
    kept_out: Collection[str] = (),
    at_last: bool = True,
) -> str | None:
    """Say what is not as it should be once all faults are over, or None.

    ``trains``: there are torchruns and ranks. ``kept_out``: who need not train yet, if others are
    enough. ``at_last``: who fails in every world has had the time to be left out again and again.
    """
    if job.last_step is not None:
        return _end(job, invariants)
    why = _members(job, invariants) or _drains(job, invariants)
    if at_last:
        why = why or _failing(job, invariants)
    return why or (_rounds(job, invariants, kept_out) if trains else None)


def _end(job: SimulatedJob, invariants: Invariants) -> str | None:
    """All of the last world end well; a spare is told no more than that the run is closed.

    Where there are stages, all pods end well: what others have ended well they pass over.
    """
    current = invariants.rounds.round
    if current.closed != "success":
        return f"the run {invariants.rounds.run} is closed by {current.closed or 'nobody'}"
    last = [job.pods[seat.member] for seat in current.frozen]
    for pod in job.present() if job.stages > 1 else last:
        if not pod.finished:
            return f"{pod.name} has not finished"
    return None


def _members(job: SimulatedJob, invariants: Invariants) -> str | None:
    snapshot, listing = invariants.snapshot, invariants.listing
    kept_out = (snapshot.members[name] for name in listing.quarantined)
    known = {member.pod_uid for member in (*listing.listed, *listing.standby, *kept_out)}
    for pod in job.present():
        if pod.terminating:
            return f"{pod.name} has not gone yet"
        if pod.sidecar is None or pod.sidecar.fenced:
            return f"{pod.name} has no sidecar that works"
        if pod.launcher != "crashing" and pod.pod_uid not in known:
            return f"{pod.name} is not listed"
        if "crashing" in job.launchers.values():
            continue  # something is written all the time
        if pod.sidecar.mirror.revision < job.engine.revision:
            return f"the mirror of {pod.name} is behind"
        if dict(pod.sidecar.mirror.kvs) != dict(invariants.truth.kvs):
            return f"the mirror of {pod.name} is not what the store holds"
    if len(snapshot.members) != len(job.present()):
        return "somebody who is gone is still a member"
    stored = snapshot.job
    if stored is None or (stored.policy.min_nodes, stored.policy.max_nodes) != job.shape.bounds:
        return f"the job is {stored}, not {job.shape}"
    return None


def _drains(job: SimulatedJob, invariants: Invariants) -> str | None:
    for drain in invariants.snapshot.drains.values():
        if not drain.outcome:
            return f"the drain of {drain.member} goes on"
    return None


def _failing(job: SimulatedJob, invariants: Invariants) -> str | None:
    """Who fails in every world is let in ever later, and left out again each time.

    Unless the others need it, or take all places.
    """
    steady = [pod for pod in job.present() if pod.launcher == "steady"]
    records = invariants.snapshot.quarantines
    for pod in job.present():
        if pod.launcher == "failing" and job.sizes.smallest <= len(steady) < job.sizes.max_nodes:
            record = records.get(pod.name)
            if record is None or not record.out or record.pauses < PAUSES:
                return f"{pod.name} fails in every world, and that is held against it: {record}"
    return None


def _rounds(
    job: SimulatedJob, invariants: Invariants, kept_out: Collection[str] = ()
) -> str | None:
    """I11: as many train as there are places, of those who ask; a pod that does not costs none."""
    steady = {pod.name for pod in job.present() if pod.launcher in ("steady", "late")}
    if len(steady.difference(kept_out)) >= job.sizes.smallest:
        steady.difference_update(kept_out)
    size = job.sizes.largest(len(steady))
    if not size:
        return None
    current = invariants.rounds.round
    world = [seat.member for seat in current.frozen]
    trains = [name for name in world if name in steady]
    if not current.complete or current.closed:
        return f"the round is {current}, and {sorted(steady)} ask"
    if len(trains) < size:
        return f"the world is {world} of {job.sizes.sizes_in_words}, and {sorted(steady)} ask"
    if len(world) > size and "crashing" not in job.launchers.values():
        return f"the world is {world}, more than {size} of {job.sizes.sizes_in_words}"
    for name in world:
        if (why := _idle(job.pod(name), current.number)) is not None:
            return why
    commit = invariants.snapshot.commit
    if commit is not None and commit.round == current.number and commit.phase in PASSING:
        return f"the commit is in {commit.phase}"
    undisturbed_s = job.loop.time() - invariants.rounds.formed_s
    if "crashing" in job.launchers.values() and undisturbed_s < UNDISTURBED_S:
        return f"the world of {world} has trained for {undisturbed_s:.1f} s"
    return None


def _idle(pod: Pod, number: int) -> str | None:
    torchrun = pod.torchrun
    if torchrun is None or torchrun.real_round != number or torchrun.rank is None:
        return f"{pod.name} is not in round {number}"
    trained = torchrun.rank.world.trained.get(pod.name, -1)
    if torchrun.rank.ended or trained < torchrun.rank.world.start + SETTLED_STEPS:
        return f"{pod.name} does not train yet"
    return None
