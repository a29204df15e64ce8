# SPDX-License-Identifier: Apache-2.0
"""The live table of a terminal: each node, its state, its ranks and how far they are."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from console.local.nodes.node import State
from console.local.nodes.run import LocalRun

_STYLES: dict[State, str] = {
    "running": "green",
    "done": "green",
    "spare": "dim",
    "stopped": "yellow",
    "restarting": "yellow",
    "closing": "yellow",
    "draining": "yellow",
    "drained": "dim",
    "failed": "bold red",
    "killed": "red",
}


def draw_table(run: LocalRun) -> Table:
    """Draw the nodes as they are now."""
    leader = run.leader
    world = f"world of {leader.world_size} at step {leader.step}" if leader else "no world yet"
    round_ = f", round {run.rounds.round.number}" if run.rounds.nodes else ""
    table = Table(title=f"{world}{round_}", title_justify="left", title_style="bold")
    for heading in ("node", "state", "ranks", "step", "restarts"):
        table.add_column(heading, justify="left" if heading in ("node", "state") else "right")
    for name in sorted(run.nodes, key=lambda name: (len(name), name)):
        node = run.nodes[name]
        ranks = run.progress.get(name, ()) if node.state in ("running", "draining") else ()
        state = "training" if ranks else node.state
        table.add_row(
            name,
            Text(state, style=_STYLES.get(node.state, "")),
            _listed(progress.rank for progress in ranks),
            str(max((progress.step for progress in ranks), default="")),
            str(node.restarts or ""),
        )
    return table


def _listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))
