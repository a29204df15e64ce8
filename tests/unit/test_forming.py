# SPDX-License-Identifier: Apache-2.0
"""What ``muster status`` says that a round waits for."""

from __future__ import annotations

import pytest

from agent.verdict.runs import RunView
from agent.verdict.view import JobView
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Job
from rdzv.snapshot import Snapshot, listing_of
from tests.support.records import member

NOW_S = 1000.0


def asks(name: str) -> Node:
    return Node(name, "asking", "n", 1, "10.0.0.1", 1, 0)


@pytest.mark.parametrize(
    ("least", "round_", "asking", "said"),
    [
        (1, Round(0), "ab", "all ask: it begins in moments"),
        (1, Round(0), "a", "waiting for the torchrun of b (joined 40 s ago)"),
        (
            2,
            Round(0),
            "a",
            "1 of at least 2 torchruns are connected; waiting for the torchrun of b",
        ),
        (1, Round(0, True, frozen=(Seat("a", "n", 1),)), "", ""),
    ],
    ids=["all", "one is silent", "below min", "complete"],
)
def test_what_a_round_waits_for_is_told(least: int, round_: Round, asking: str, said: str) -> None:
    members = {name: member(name, min_workers=least) for name in "ab"}
    snapshot = Snapshot(job=Job(least, 4), members=members, revision=5)
    run = RunView("digits", round_, tuple(asks(name) for name in asking))
    joined = HistoryEntry("join", "b", "", NOW_S - 40)
    view = JobView("team", "digits", snapshot, listing_of(snapshot), (run,), (joined,), {}, {})
    assert view.awaited(run, NOW_S).startswith(said)
    assert bool(view.awaited(run, NOW_S)) == bool(said)
