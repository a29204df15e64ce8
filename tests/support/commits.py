# SPDX-License-Identifier: Apache-2.0
"""A commit of two pods as their sidecars see it, with the data cursors that their ranks give."""

from __future__ import annotations

from dataclasses import replace

from rdzv import snapshot
from rdzv.drain.decision import decide
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy, LiveRound
from rdzv.drain.saves import newest_saved, saves_of
from rdzv.records.drain import Commit, Drain, LastCommit, Vote
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import PodSaves, RankProgress
from rdzv.snapshot import Snapshot
from tests.support.records import member

MASTER = "10.0.0.1:29500"
ROUND = LiveRound("run", 3, True, ("a", "b"), master=MASTER, mod_revision=70)
SAVE = Commit(5, "run", 3, "commit", step=10, leaving=("uid-a",), mod_revision=60)
DRAIN = Drain("uid-a", "a", "spot", "sigterm", mod_revision=50)
HERE, THERE = '{"samples":640}', '{"samples":600}'


def scene(votes: dict[str, Vote] | None = None) -> DrainingSnapshot:
    members = {name: member(name, at) for at, name in enumerate("abc", 1)}
    commit = SAVE if votes else replace(SAVE, phase="idle")
    membership = Snapshot(90, Job(JobPolicy(1, 4), mod_revision=7), members, commit=commit)
    if votes:
        membership = replace(membership, drains={"uid-a": DRAIN})
    seen = snapshot.listing_of(membership)
    return DrainingSnapshot(membership, seen, ROUND, votes or {}, "uid-b", revision=90)


def vote(name: str, cursor: str, *ranks: int) -> Vote:
    return Vote(5, 3, f"uid-{name}", 10, acked=10, cursor=cursor, ranks=ranks)


def becomes(*votes: Vote, failures: int = 0) -> tuple[Commit, LastCommit | None]:
    times = DrainObservations(5, "commit", 1000.0, 1000.0, {})
    found = {one.pod_uid[-1]: one for one in votes}
    seen = scene(found)
    commit = replace(SAVE, failures=failures)
    seen = replace(seen, membership=replace(seen.membership, commit=commit))
    decision = decide(1000.0, seen, times, DrainPolicy())
    assert decision.commit is not None, decision.reason
    return decision.commit, decision.last_commit


def last_of(*votes: Vote) -> LastCommit:
    """The last commit that these votes make."""
    done, last = becomes(*votes)
    assert last is not None, done.reason
    assert done.phase == "done"
    return last


def saves_of_pod(*ranks: RankProgress) -> PodSaves:
    """What the pod ``a`` tells of the periodic saves of its ranks."""
    saves = saves_of(ranks, ROUND, "a", "uid-a")
    assert saves is not None
    return saves


def periodic(*pods: PodSaves) -> LastCommit:
    """The last commit that these periodic saves make."""
    last, why = newest_saved(scene(), {one.member: one for one in pods})
    assert last is not None, why
    return last


def rank(number: int, cursor: str) -> RankProgress:
    return RankProgress(
        number, 2, MASTER, 10, True, False, (5, 10), saved=(10,), rank=number, cursors=(cursor,)
    )
