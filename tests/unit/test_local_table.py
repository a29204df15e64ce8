# SPDX-License-Identifier: Apache-2.0
"""The live table of ``muster local``, as a terminal shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO
from types import SimpleNamespace
from typing import cast

from rich.console import Console

from agent.verdict.view import JobView
from console.local.run import LocalRun
from console.local.screen import STEPS_UNKNOWN_AFTER_S, draw_table
from console.local.standing import awaited, node_standing
from console.local.timeline import Progress
from rdzv.records.drain import Commit, Drain, Outcome
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot, listing_of
from tests.support.records import member

NOW_S = 30.0


def run(
    progress: Mapping[str, tuple[Progress, ...]] | None = None,
    *,
    began_s: float | None = None,
    next_event: tuple[str, float] | None = None,
    view: JobView | None = None,
    waits: str = "",
    last_step_s: float = 0.0,
) -> LocalRun:
    """As much of a run as a table shows: two nodes that run, and one that was drained."""
    progress = progress or {}
    nodes = {
        "node-10": SimpleNamespace(state="running", restarts=2),
        "node-2": SimpleNamespace(state="running", restarts=0),
        "node-3": SimpleNamespace(state="drained", restarts=0),
    }
    in_round = {"node-2": (0,), "node-10": (1,)} if began_s is not None else {}
    rounds = SimpleNamespace(
        nodes=in_round,
        ranks_of=lambda name: in_round.get(name, ()),
        round=SimpleNamespace(number=4, shown=4),
        began_s=began_s,
    )
    leader = next((rank for ranks in progress.values() for rank in ranks if rank.rank == 0), None)
    shown = SimpleNamespace(
        nodes=nodes,
        progress=progress,
        rounds=rounds,
        leader=leader,
        last_step_s=last_step_s,
        view=view,
        awaited=waits,
        now_s=NOW_S,
        next_event=next_event,
    )
    return cast(LocalRun, shown)


def drawn(shown: LocalRun) -> tuple[str, list[list[str]]]:
    """The title, and the words of each line below it."""
    title, *others = on_a_screen(shown, 120)
    bare = [re.sub("[\u2500-\u257f]", " ", line).split() for line in others]
    return title, [words for words in bare if words]


def on_a_screen(shown: LocalRun, columns: int) -> list[str]:
    console = Console(width=columns, file=StringIO())
    with console.capture() as text:
        console.print(draw_table(shown))
    return [line.rstrip() for line in text.get().splitlines()]


def test_before_the_first_world_it_shows_the_nodes_in_their_order() -> None:
    title, (headings, *rows) = drawn(run(next_event=("drain node-2", NOW_S + 5)))
    assert title == "no world yet; 30 s, next: drain node-2 in 5 s"
    assert headings == ["node", "state", "ranks", "restarts"]
    assert rows == [["node-2", "running"], ["node-3", "drained"], ["node-10", "running", "2"]]


def test_a_round_without_reported_steps_says_so_after_a_while() -> None:
    title, (_, *rows) = drawn(run(began_s=NOW_S - 1))
    assert title == "round 4: 2 ranks; 30 s"
    assert rows == [
        ["node-2", "running", "0"],
        ["node-3", "drained"],
        ["node-10", "running", "1", "2"],
    ]
    title, _ = drawn(run(began_s=NOW_S - STEPS_UNKNOWN_AFTER_S - 1))
    assert title == "round 4: 2 ranks, no step seen for 11 s; 30 s"
    title, _ = drawn(run(began_s=1.0, last_step_s=NOW_S - 12))
    assert title == "round 4: 2 ranks, no step seen for 12 s; 30 s"


def test_a_world_that_reports_steps_has_a_column_of_them() -> None:
    progress = {
        "node-2": (Progress(1, 0, 2, 0, 41, 0.0),),
        "node-10": (Progress(2, 1, 2, 0, 40, 0.0),),
    }
    title, (headings, *rows) = drawn(run(progress, began_s=NOW_S - 20))
    assert title == "world of 2 at step 41, round 4; 30 s"
    assert headings == ["node", "state", "ranks", "step", "restarts"]
    assert rows == [
        ["node-2", "training", "0", "41"],
        ["node-3", "drained"],
        ["node-10", "training", "1", "40", "2"],
    ]


def job(
    outcomes: Mapping[str, Outcome], *, least: int = 1, commit: Commit | None = None
) -> JobView:
    """A job of node-2, node-3 and node-10; those that drain do so with an outcome."""
    members = {name: member(name, min_workers=least) for name in ("node-2", "node-3", "node-10")}
    drains = {}
    for name, outcome in outcomes.items():
        uid = members[name].pod_uid
        drains[uid] = Drain(uid, name, "asked for by hand", "operator", outcome=outcome)
    snapshot = Snapshot(
        job=Job(JobPolicy(least, 4)), members=members, drains=drains, revision=5, commit=commit
    )
    return JobView("local", "local", snapshot, listing_of(snapshot), (), (), {}, {})


RANKS = {
    "node-2": (Progress(1, 0, 2, 0, 41, 0.0),),
    "node-10": (Progress(2, 1, 2, 0, 40, 0.0),),
}


def test_a_node_drained_by_hand_is_idle_and_shows_no_step() -> None:
    seen = job({"node-10": "committed"})
    _, (_, *rows) = drawn(run(RANKS, began_s=NOW_S - 20, view=seen))
    assert rows[0] == ["node-2", "training", "0", "41"]
    assert rows[2] == ["node-10", "drained,", "idle", "2"]


def test_a_drain_shows_its_phase() -> None:
    saving = Commit(1, "local", 4, "commit", leaving=("uid-node-10",), step=50)
    _, (_, *rows) = drawn(run(RANKS, began_s=NOW_S - 20, view=job({"node-10": ""}, commit=saving)))
    assert rows[2] == ["node-10", "saving", "1", "40", "2"]


def test_a_node_without_a_place_waits() -> None:
    waits = node_standing("running", "node-2", job({}), has_ranks=True, in_round=False)
    assert (waits.state, waits.trains) == ("waiting", False)
    ended = node_standing("killed", "node-2", job({}), has_ranks=True, in_round=True)
    assert (ended.state, ended.trains) == ("killed", False)


def test_a_job_that_has_lost_too_many_nodes_says_what_it_waits_for() -> None:
    drained: dict[str, Outcome] = dict.fromkeys(("node-2", "node-3", "node-10"), "uncommitted")
    assert awaited(job(drained), "") == (
        "nothing can train: no node is left (min 1); node-10, node-2 and node-3 are drained"
        " (muster drain node-10 --cancel takes it back); Ctrl-C ends the run"
    )
    del drained["node-2"]
    assert awaited(job(drained), "") == ""
    assert awaited(job(drained, least=2), "add node-3 at 75 s") == (
        "nothing can train: 1 node left (min 2); node-10 and node-3 are drained"
        " (muster drain node-10 --cancel takes it back); next: add node-3 at 75 s"
    )
    assert awaited(job(drained, least=2), "").endswith(
        "; muster set --min 1 trains with fewer; Ctrl-C ends the run"
    )
    assert awaited(job({**drained, "node-2": ""}), "") == "", "one that drains may train on"
    assert awaited(None, "") == ""


def test_the_headline_says_what_it_waits_for_and_is_cut_to_the_terminal() -> None:
    shown = run(RANKS, began_s=NOW_S - 20, waits="nothing can train: " + "node-1 " * 20)
    for columns in (40, 80, 120, 200):
        title, second, *_ = on_a_screen(shown, columns)
        assert title.startswith("nothing can train: node-1")
        assert len(title) <= columns
        assert title.endswith("\N{HORIZONTAL ELLIPSIS}") is (columns < 200)
        assert second.startswith("\u250f"), "the table follows on the next line"
