# SPDX-License-Identifier: Apache-2.0
"""The live table of ``muster local``, as a terminal shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO
from types import SimpleNamespace
from typing import cast

from rich.console import Console

from console.local.nodes.run import LocalRun
from console.local.report.progress import Progress
from console.local.table import STEPS_UNKNOWN_AFTER_S, draw_table

NOW_S = 30.0


def run(
    progress: Mapping[str, tuple[Progress, ...]] | None = None,
    *,
    began_s: float | None = None,
    next_event: tuple[str, float] | None = None,
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
        round=SimpleNamespace(number=4),
        began_s=began_s,
    )
    leader = next((rank for ranks in progress.values() for rank in ranks if rank.rank == 0), None)
    shown = SimpleNamespace(
        nodes=nodes,
        progress=progress,
        rounds=rounds,
        leader=leader,
        now_s=NOW_S,
        next_event=next_event,
    )
    return cast(LocalRun, shown)


def drawn(shown: LocalRun) -> tuple[str, list[list[str]]]:
    """The title, and the words of each line below it."""
    table = draw_table(shown)
    console = Console(width=120, file=StringIO())
    with console.capture() as text:
        console.print(table)
    bare = re.sub("[\u2500-\u257f]", " ", text.get())
    lines = [line.split() for line in bare.splitlines() if line.strip()]
    return str(table.title), lines[next(at for at, line in enumerate(lines) if line[0] == "node") :]


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
    assert "steps unknown: the script does not call muster.report_step" in title


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
