# SPDX-License-Identifier: Apache-2.0
"""Jobs as the store has them, for what explains them: two members, and one run."""

from __future__ import annotations

from typing import Any

from agent.verdict.runs import RunView
from agent.verdict.view import JobView
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.records.drain import Commit
from rdzv.records.job import HistoryEntry, Job
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import PodSaves
from rdzv.records.troubles import Failure
from rdzv.snapshot import Snapshot, listing_of
from tests.support.records import member

NOW_S = 10_000.0
TRAINS = Round(3, True, frozen=(Seat("a", "n", 1), Seat("b", "n", 1)))
FAILED = Failure("b", "digits", 3, 1, "ValueError", "bad shape", "t.py:3", at_unix_s=NOW_S - 8)
STORED = ("commit", "last_commit", "quarantines", "drains")
ASKS = (Node("a", "asking", "n", 1, "10.0.0.1", 1, 0),)


def view(
    *runs: RunView, names: str = "ab", least: int = 1, paused: bool = False, **more: Any
) -> JobView:
    members = {name: member(name, min_workers=least) for name in names}
    job = Job(JobPolicy(least, 4), paused=paused) if names else None
    members |= {one.name: one for one in more.pop("members", ())}
    stored = {name: more.pop(name) for name in STORED if name in more}
    snapshot = Snapshot(job=job, members=members, revision=5, **stored)
    history = (HistoryEntry("round", "a", "", NOW_S - 252), *more.pop("history", ()))
    saves = more.pop("saves", {})
    bypasses = more.pop("bypasses", {})
    return JobView(
        "team", "digits", snapshot, listing_of(snapshot), runs, history, bypasses, saves, **more
    )


def run(round_: Round = TRAINS, nodes: tuple[Node, ...] = ()) -> RunView:
    return RunView("digits", round_, nodes)


def reported(step: int, ago_s: float) -> dict[str, PodSaves]:
    one = PodSaves("a", "uid-a", "digits", 3, step=step, at_unix_s=NOW_S - ago_s)
    return {"a": one}


def committing(phase: str, *leaving: str) -> Commit:
    return Commit(1, "digits", 3, phase, leaving=leaving, reason="all save")  # type: ignore[arg-type]
