# SPDX-License-Identifier: Apache-2.0
"""The live table of a terminal: each node, its state, its ranks and their step."""

from __future__ import annotations

from collections.abc import Iterable
from time import time

from rich.console import Group
from rich.table import Table
from rich.text import Text

from console.local.nodes.run import LocalRun
from console.local.nodes.standing import job_standing, node_standing, styles
from rdzv.sentences import counted

STEPS_UNKNOWN_AFTER_S = 10.0
"""Time after the start of a round when a script without a reported step probably reports none."""


def draw_table(run: LocalRun) -> Group:
    """Draw a headline, cut to the terminal, and the nodes; steps only if a script reports any."""
    table = Table()
    stepped = any(run.progress.values())
    headings = ["node", "state", "ranks", *(["step"] if stepped else []), "restarts"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("node", "state") else "right")
    for name in sorted(run.nodes, key=lambda name: (len(name), name)):
        node, ranks = run.nodes[name], run.progress.get(name, ())
        standing = node_standing(
            node.state, name, run.view, has_ranks=bool(ranks), in_round=name in run.rounds.nodes
        )
        if not standing.trains:
            ranks = ()
        numbers: Iterable[int] = (progress.rank for progress in ranks)
        if standing.trains and not stepped:
            numbers = run.rounds.ranks_of(name)
        cells = [_listed(numbers)]
        if stepped:
            cells.append(str(max((progress.step for progress in ranks), default="")))
        state = Text(standing.state, style=styles().get(standing.state, ""))
        table.add_row(name, state, *cells, str(node.restarts or ""))
    return Group(Text(headline(run), style="bold", no_wrap=True, overflow="ellipsis"), table)


def headline(run: LocalRun) -> str:
    """Return the state of the job, the duration of the run so far, and the next event."""
    now_s, event = run.now_s, run.next_event
    coming = f", next: {event[0]} in {max(0.0, event[1] - now_s):.0f} s" if event else ""
    return f"{_state(run)}; {now_s:.0f} s{coming}"


def _state(run: LocalRun) -> str:
    leader, rounds = run.leader, run.rounds
    if standing := run.awaited or job_standing(run.view, time()):
        return standing
    if leader is not None:
        world = f"world of {leader.world_size} at step {leader.step}"
        return f"{world}, round {rounds.round.shown}" if rounds.nodes else world
    if not rounds.nodes:
        return "no world yet"
    ranks = sum(len(rounds.ranks_of(name)) for name in rounds.nodes)
    world = f"round {rounds.round.shown}: {counted(ranks, 'rank')}"
    if rounds.began_s is None:
        return world
    age_s = run.now_s - max(rounds.began_s, run.last_step_s)
    if age_s > STEPS_UNKNOWN_AFTER_S:
        return f"{world}, no step seen for {age_s:.0f} s"
    return world


def _listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))
