# SPDX-License-Identifier: Apache-2.0
"""The page's data on all jobs, as plain values of their states; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from controller.jobs.state import JobState
from launcher_shim.c10d.rounds.records import Round
from rdzv.drain.phases import phase_of
from rdzv.errors import RecordError

NEWEST = 8
"""Number of history entries to show."""


def summary(states: Iterable[JobState]) -> list[dict[str, Any]]:
    """Build the data of all jobs, those with members first."""
    found = [_job(one) for one in states]
    return sorted(found, key=lambda job: (not job["members"], job["namespace"], job["job"]))


def _job(state: JobState) -> dict[str, Any]:
    snapshot, job = state.snapshot, state.snapshot.job
    assert job is not None
    newest = list(rounds(state, job.generation))
    worlds = [_world(run, found) for run, found in newest]
    ends = {s.member for _, one in newest if one.finishing and not one.closed for s in one.frozen}
    trains = {name for world in worlds if world["complete"] for name in world["nodes"]}
    last = snapshot.commit_to_start_from
    history = reversed(state.entries_after(0)[-NEWEST:])
    return {
        "namespace": state.keys.namespace,
        "job": state.keys.job_name,
        "generation": job.generation,
        "min": job.min_workers,
        "max": job.max_workers,
        "desired": job.desired,
        "paused": job.paused,
        "sentence": state.listing.reason,
        "last_commit": None if last is None else {"step": last.step, "at_unix_s": last.at_unix_s},
        "members": list(_members(state, trains)),
        "worlds": worlds,
        "drains": list(_drains(state, ends)),
        "history": [
            {"at_unix_s": one.at_unix_s, "what": one.what, "who": one.member, "why": one.why}
            for one in history
        ],
    }


def _members(state: JobState, trains: set[str]) -> Iterator[dict[str, str]]:
    listing = state.listing
    standby = {one.name for one in listing.standby}
    for member in sorted(state.snapshot.members.values(), key=lambda one: one.age_order):
        why = listing.excluded.get(member.name, "")
        stands = "standby" if member.name in standby else "listed"
        if member.name in trains:
            stands = "trains"
        elif why:
            stands = "excluded"
        yield {"name": member.name, "node": member.node, "state": stands, "why": why}


def rounds(state: JobState, generation: int) -> Iterator[tuple[str, Round]]:
    """Yield the newest round of each run that can be read."""
    here = state.keys.in_generation(generation)
    for kv in state.rounds:
        run = here.run_of_round(kv.key)
        if run is None:
            continue
        try:
            yield run, Round.from_kv(kv)
        except RecordError:
            continue  # the sidecars report it


def _world(run: str, found: Round) -> dict[str, Any]:
    return {
        "run": run,
        "round": found.number,
        "complete": found.complete and not found.closed,
        "closed": found.closed,
        "nodes": [seat.member for seat in found.frozen],
    }


def _drains(state: JobState, ends: set[str]) -> Iterator[dict[str, str]]:
    """Yield the drains of the pods that are there; ``ends``: members whose world is finishing."""
    here = {one.pod_uid for one in state.snapshot.members.values()}
    for drain in state.snapshot.drains.values():
        if drain.pod_uid in here:
            phase = phase_of(state.snapshot, drain, finishing=drain.member in ends)
            asked = drain.requested_by if drain.requested_by != drain.member else drain.source
            yield {
                "member": drain.member,
                "reason": drain.reason,
                "asked_by": asked,
                "phase": phase.name,
                "sentence": phase.sentence,
            }
