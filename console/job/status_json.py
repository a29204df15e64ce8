# SPDX-License-Identifier: Apache-2.0
"""A job as ``muster status --json`` has it, its pods and their figures. Pure.

Other commands make their tables of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from agent.verdict.decision import verdict
from agent.verdict.states import Level
from agent.verdict.view import JobView
from rdzv.records.job import Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.records.troubles import Failure
from rdzv.sentences import duration
from rdzv.shard_ledger import ShardLedger, progress, progress_warning

SHORTEST_S = 1.0
"""Time between two reports that gives a rate, in seconds: a shorter one gives noise."""

LEVELS: Mapping[str, Level] = {
    "training": "ok",
    "finishing": "ok",
    "waiting": "note",
    "ready": "note",
    "standby": "note",
    "draining": "note",
    "failing": "fault",
    "stuck": "fault",
    "quarantined": "warning",
    "excluded": "warning",
}

EVENTS = 5
"""The newest entries of the history that are shown; ``muster history`` has all."""


@dataclass(frozen=True, slots=True)
class PodRow:
    """One pod: its activity in a word, and its figures; None if unknown.

    ``ranks``: the numbers of its ranks, as in ``0-7``. ``step``: the last that its world reported.
    ``rate``: steps a second of its world. ``failures`` in a row without progress. ``waits``: the
    share of its time that its slowest rank waits for others.
    """

    name: str
    doing: str
    ranks: str = ""
    step: int | None = None
    rate: float | None = None
    failures: int = 0
    age_s: float | None = None
    waits: float | None = None

    @property
    def level(self) -> Level | None:
        """The colour of its activity."""
        return LEVELS.get(self.doing)

    def cells(self) -> dict[str, str]:
        """Return its figures as columns."""
        return {
            "RANKS": self.ranks or "-",
            "STEP": "-" if self.step is None else f"{self.step:,}",
            "STEP/S": "-" if self.rate is None else f"{self.rate:.3g}",
            "FAILS": str(self.failures),
            "AGE": "-" if self.age_s is None else duration(self.age_s),
        }


def pods_of(view: JobView, now_unix_s: float) -> list[PodRow]:
    """Return the job's pods, in the order of ``view.members()``."""
    failing = view.failing(now_unix_s)
    joins = {one.member: one.at_unix_s for one in view.history if one.what == "join"}
    members, steps, world_rate = view.members(), view.steps, rate(view)
    # Ranks of a world step together, and the pod of rank 0 reports most often.
    furthest = max(steps.values(), default=None)
    run = view.newest_run
    world = [] if run is None or not run.round.complete else run.round.frozen
    slots = {member.name: member.slots for member, _, _ in members}
    ranks, next_rank = {}, 0
    for seat in world:
        size = slots.get(seat.member, 1)
        ranks[seat.member] = f"{next_rank}-{next_rank + size - 1}" if size > 1 else f"{next_rank}"
        next_rank += size
    if run is None:
        ranks = {one.member: _spelt(one.ranks) for one in view.reports}
    waits = view.waits
    stuck = {pod for pod, _ in view.standstill.causes} if view.standstill is not None else set()
    found = []
    for member, state, _ in members:
        name = member.name
        in_world = name in ranks and (run is None or name in view.places.taken)
        doing = state
        if state == "listed" and failing is not None and failing.member == name:
            doing = "failing"
        elif state == "listed" and name in stuck:
            doing = "stuck"
        elif state == "listed" and in_world:
            doing = "finishing" if view.finishes(name) else "training"
            if run is None and view.pause:
                doing = "waiting"
        elif state == "listed":
            doing = "waiting" if name in view.places.asking else "ready"
        failure = view.failures.get(name)
        found.append(
            PodRow(
                name,
                doing,
                ranks[name] if in_world else "",
                furthest if in_world else steps.get(name),
                world_rate if in_world else None,
                failure.count if failure is not None else 0,
                max(0.0, now_unix_s - joins[name]) if name in joins else None,
                waits.get(name) if in_world else None,
            )
        )
    return found


def _spelt(ranks: Sequence[int]) -> str:
    """Return numbers of ranks as in ``0-3``, or ``0,2`` if some are missing between."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] + 1 == len(ranks):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def rate(view: JobView) -> float | None:
    """Return the steps a second of the world that trains, since its last save or its start.

    None if it is unknown: without a save on record, or with one of an earlier world whose steps may
    be trained again.
    """
    run, saved, last = view.newest_run, view.snapshot.commit_to_start_from, view.last_save
    if run is None or saved is None or last is None or last.seen_step is None:
        return None
    since_s = saved.at_unix_s
    if saved.round != run.round.number or not saved.is_of(run.run_id):
        starts = [one.at_unix_s for one in view.history if one.what == "round"]
        since_s = max([*starts, 0.0])
    steps, took_s = last.seen_step - saved.step, last.seen_at_unix_s - since_s
    if not since_s or took_s < SHORTEST_S or steps <= 0:
        return None
    return steps / took_s


def _values(job: Job | None) -> dict[str, object]:
    """Return the values of the job that an operator sets; without a job, none of them."""
    if job is not None:
        return job.values
    return {
        name: [] if value == [] else None for name, value in Job(JobPolicy(1, 1)).values.items()
    }


def status_json(view: JobView, now_unix_s: float) -> dict[str, object]:
    """Return the job as one object for programs; ``now_unix_s`` is the time of the ages in it."""
    job, pods = view.job, pods_of(view, now_unix_s)
    straggler = view.straggler
    slow = set() if straggler is None else {pod for pod, _ in straggler.ranks}
    return {
        "namespace": view.namespace,
        "job": view.name,
        "at_unix_s": now_unix_s,
        "revision": view.snapshot.revision,
        "generation": job.generation if job else None,
        **_values(job),
        "verdict": verdict(view, now_unix_s).as_json(),
        "paused": bool(view.pause),
        "pause": view.pause,
        "reason": view.listing.reason,
        "members": [
            _member_json(view, member, state, why, pod, now_unix_s, slow=member.name in slow)
            for (member, state, why), pod in zip(view.members(now_unix_s), pods, strict=True)
        ],
        "runs": [
            {
                "run_id": run.run_id,
                "round": run.round.number,
                "state": run.state,
                "nodes": [seat.member for seat in run.round.frozen],
                "waiting": [node.member for node in run.nodes if node.state == "asking"],
                "awaited": view.awaited(run, now_unix_s),
            }
            for run in view.runs
        ],
        "last_save": None if (last_save := view.last_save) is None else last_save.as_json(),
        "steps_per_s": rate(view),
        "slow_save": view.slow_save,
        "straggler": "" if straggler is None else straggler.sentence,
        "shards": {name: _shards_json(name, one) for name, one in view.shards.items()},
        "corrupt": dict(view.snapshot.corrupt),
        "events": [
            {
                "at_unix_s": one.at_unix_s,
                "what": one.what,
                "member": one.member,
                "why": one.why,
            }
            for one in view.history[-EVENTS:]
        ],
    }


def _member_json(
    view: JobView,
    member: Member,
    state: str,
    why: str,
    pod: PodRow,
    now_unix_s: float,
    *,
    slow: bool,
) -> dict[str, object]:
    return {
        "name": member.name,
        "state": state,
        "doing": pod.doing,
        "ranks": pod.ranks,
        "step": pod.step,
        "waits": pod.waits,
        "slow": slow,
        "joined_unix_s": None if pod.age_s is None else now_unix_s - pod.age_s,
        "why": why,
        "role": member.role,
        "slots": member.slots,
        "address": member.address,
        "node": member.node,
        "topology": member.topology,
        "incarnation": member.incarnation,
        "version": member.version,
        "failure": _failure_json(view.failures.get(member.name)),
        "launcher": view.bypasses[member.name].kind if member.name in view.bypasses else "",
    }


def _shards_json(name: str, ledger: ShardLedger) -> dict[str, object]:
    found = progress(ledger)
    shards = None if found is None else asdict(found)
    return {"progress": shards, "warning": progress_warning(name, ledger) or ledger.unreadable}


def _failure_json(failure: Failure | None) -> dict[str, object] | None:
    if failure is None:
        return None
    return {
        "round": failure.round,
        "rank": failure.rank,
        "error": failure.error,
        "in_a_row": failure.count,
        "at_unix_s": failure.at_unix_s,
    }
