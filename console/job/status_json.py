# SPDX-License-Identifier: Apache-2.0
"""A job as ``muster status --json`` has it, which other commands make their tables of: pure."""

from __future__ import annotations

from dataclasses import asdict

from agent.verdict.decision import verdict
from agent.verdict.view import JobView
from console.job.pods import pods_of, rate
from rdzv.records.troubles import Failure
from rdzv.shard_ledger import ShardLedger, progress, progress_warning

EVENTS = 5
"""The newest entries of the history that are shown; ``muster history`` has all."""


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
        "min": job.min_workers if job else None,
        "max": job.max_workers if job else None,
        "desired": job.desired if job else None,
        "sizes": list(job.allowed_sizes) if job else [],
        "unit": job.unit if job else None,
        "gather_s": job.gather_s if job else None,
        "verdict": verdict(view, now_unix_s).as_json(),
        "paused": bool(view.pause),
        "pause": view.pause,
        "reason": view.listing.reason,
        "members": [
            {
                "name": member.name,
                "state": state,
                "doing": pod.doing,
                "ranks": pod.ranks,
                "step": pod.step,
                "waits": pod.waits,
                "slow": member.name in slow,
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
