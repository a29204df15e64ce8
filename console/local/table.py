# SPDX-License-Identifier: Apache-2.0
"""The live table of a terminal: each node, its state, its ranks and their step."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from console.local.nodes.node import State
from console.local.nodes.run import LocalRun

_STYLES: dict[State, str] = {
    # Of the 256 colours, those that are readable on a dark background and on a light one.
    "running": "green4",
    "done": "green4",
    "spare": "dim",
    "stopped": "dark_orange3",
    "restarting": "dark_orange3",
    "closing": "dark_orange3",
    "draining": "dark_orange3",
    "drained": "dim",
    "failed": "bold red",
    "killed": "red",
}


STEPS_UNKNOWN_AFTER_S = 10.0
"""Time after the start of a round when a script without a reported step probably reports none."""


def draw_table(run: LocalRun) -> Table:
    """Draw the nodes as they are now; the column of steps only if a script reports any."""
    table = Table(title=_title(run), title_justify="left", title_style="bold")
    stepped = any(run.progress.values())
    headings = ["node", "state", "ranks", *(["step"] if stepped else []), "restarts"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("node", "state") else "right")
    for name in sorted(run.nodes, key=lambda name: (len(name), name)):
        node = run.nodes[name]
        ranks = run.progress.get(name, ()) if node.state in ("running", "draining") else ()
        state = "training" if ranks else node.state
        cells = [_listed(progress.rank for progress in ranks)]
        if stepped:
            cells.append(str(max((progress.step for progress in ranks), default="")))
        elif node.state == "running":
            cells = [_listed(run.rounds.ranks_of(name))]
        style = _STYLES.get(node.state, "")
        table.add_row(name, Text(state, style=style), *cells, str(node.restarts or ""))
    return table


def _title(run: LocalRun) -> str:
    """Return the title: the world, the duration of the run so far, and the next event."""
    now_s = run.now_s
    leader, rounds = run.leader, run.rounds
    if leader is not None:
        world = f"world of {leader.world_size} at step {leader.step}"
        world += f", round {rounds.round.number}" if rounds.nodes else ""
    elif rounds.nodes:
        ranks = sum(len(rounds.ranks_of(name)) for name in rounds.nodes)
        world = f"round {rounds.round.number}: {ranks} rank{'' if ranks == 1 else 's'}"
        if rounds.began_s is not None and now_s - rounds.began_s > STEPS_UNKNOWN_AFTER_S:
            world += " (steps unknown: the script does not call muster.report_step)"
    else:
        world = "no world yet"
    event = run.next_event
    coming = f", next: {event[0]} in {max(0.0, event[1] - now_s):.0f} s" if event else ""
    return f"{world}; {now_s:.0f} s{coming}"


def _listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))
