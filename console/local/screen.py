# SPDX-License-Identifier: Apache-2.0
"""A run on the screen: how its nodes stand, its lines without repeats, last words and result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import time

import click
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agent.verdict.decision import verdict
from agent.verdict.states import STATES
from agent.verdict.view import JobView
from console.local.costs import beside, closing_lines, costs, facts
from console.local.node import State
from console.local.payload import read_last_words
from console.local.picture import draw_picture
from console.local.run import LocalRun
from console.local.settings import LAUNCHER, LocalSettings
from console.local.timeline import Moment, Timeline
from console.local.worker_watch import WorkerFailure
from rdzv.drain.standing import phase_of
from rdzv.sentences import counted

TAIL_LINES = 15

WAITING_STATES = frozenset(state for state, row in STATES.items() if row.level != "ok")
"""States of a job in which no world gets on."""

_GOOD, _CHANGING = "green4", "dark_orange3"

STYLES = {
    "running": _GOOD,
    "training": _GOOD,
    "done": _GOOD,
    "spare": "dim",
    "standby": "dim",
    "drained": "dim",
    "drained, idle": "dim",
    "leaving": "dim",
    "failed": "bold red",
    "killed": "red",
    "quarantined": "red",
    **dict.fromkeys(("stopped", "restarting", "closing", "waiting"), _CHANGING),
    **dict.fromkeys(("draining", "agreeing", "saving", "saved", "finishing"), _CHANGING),
}
"""The colour of each state that has one: readable on dark and light backgrounds."""

STEPS_UNKNOWN_AFTER_S = 10.0
"""Time after the start of a round when a script without a reported step probably reports none."""

SHOWN_TIMES = 3

REPEATING = ("round", "loading", "error", "ended")
"""The moments that repeat: failing workers cause a new round, whose workers fail, too."""

_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Native:
    """The same drill without Muster: its timeline, and its exit status."""

    timeline: Timeline
    status: int


def print_line(screen: Console, text: str) -> None:
    """Print a line as it is, without guessed colours and without breaking a path in two."""
    screen.print(text, highlight=False, markup=False, soft_wrap=True)


def show_last_words(screen: Console, run: LocalRun, status: int) -> None:
    """Print the job's last output: its result if it finished, else its failure."""
    failed = next((ending.node for ending in run.endings if ending.how == "failed"), None)
    rank_0 = run.last_leader or run.rounds.last_rank_0
    speaker = LAUNCHER if LAUNCHER in run.nodes else rank_0 if status == 0 else failed
    node = run.nodes.get(speaker or "")
    lines = read_last_words(node.launcher_log, 1 if status == 0 else TAIL_LINES) if node else []
    if node is None or not lines:
        return
    print_line(screen, f"\n{node.name} said last ({node.launcher_log}):")
    for line in lines:
        print_line(screen, f"  {line}")


def show_traceback(screen: Console, failure: WorkerFailure) -> None:
    """Print the traceback of the worker whose error ended the job."""
    if failure.traceback:
        print_line(screen, "\nTraceback (most recent call last):")
        for line in failure.traceback[-TAIL_LINES:]:
            print_line(screen, line)


def show_result(
    screen: Console, timeline: Timeline, native: Native | None, *, finished: bool
) -> None:
    """Print what the whole run came to, and what each event cost: in a box on a terminal."""
    title, rows = facts(timeline, finished=finished), result_rows(timeline, native)
    alone = f"torchrun alone: {_outcome(native)}" if native is not None else ""
    print_line(screen, "")
    if screen.is_terminal and rows:
        beside = native is not None
        table = Table(box=None, show_header=beside, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("", "Muster", "", *(["torchrun alone"] if beside else [])):
            table.add_column(heading, header_style="bold")
        for row in rows:
            table.add_row(*map(Text, row))
        inside = Group(table, Text(alone, style="dim")) if alone else table
        screen.print(Panel(inside, title=Text(title), title_align="left", expand=False))
    else:
        print_line(screen, title)
        if native is not None:
            rows = [(*row[:-1], f"torchrun: {row[-1]}") for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print_line(screen, f"  {'   '.join(cells)}".rstrip())
        if alone:
            print_line(screen, alone)
    for line in [*closing_lines(timeline), *_incomparable(timeline, native)]:
        print_line(screen, line)


def result_rows(timeline: Timeline, native: Native | None) -> list[tuple[str, ...]]:
    """Return a row for each change: what, the pause, the steps and, if known, torchrun's."""
    own = costs(timeline)
    if native is None:
        return [(one.what, one.pause, one.steps) for one in own]
    alone = beside(own, costs(native.timeline), finished=native.status == 0)
    return [(one.what, one.pause, one.steps, words) for one, words in zip(own, alone, strict=True)]


def _incomparable(timeline: Timeline, native: Native | None) -> Iterator[str]:
    """Yield a warning if the second run began where the first had been, and not at its start."""
    if native is None or not timeline.worlds.all:
        return
    own, others = timeline.worlds.all[0], native.timeline.worlds.all
    elsewhere = "the script keeps checkpoints outside of CHECKPOINT_DIR"
    if others and others[0].first_step > max(own.last_step, own.first_step + own.every):
        yield (
            f"warning: torchrun alone began at step {others[0].first_step}: {elsewhere}, so the two"
            " runs cannot be compared."
        )
    if not others and native.status == 0:
        yield f"warning: torchrun alone finished without a step: perhaps {elsewhere}."


def _outcome(native: Native) -> str:
    whole = facts(native.timeline, finished=native.status == 0)
    return f"{whole}; {native.timeline.moments[-1].detail}"


def write_report(
    directory: Path,
    settings: LocalSettings,
    timeline: Timeline,
    status: int,
    native: Native | None,
) -> bool:
    """Write the report; return whether that worked. A failure leaves the job's status as it is."""
    report = timeline.to_json(settings.line.command, status)
    report["costs"] = [one.to_json() for one in costs(timeline)]
    if native is not None:
        second = native.timeline.to_json(settings.line.command, native.status)
        report["native"] = second | {"costs": [one.to_json() for one in costs(native.timeline)]}
    alone, alone_finished = (native.timeline, native.status == 0) if native else (None, False)
    try:
        _replace(directory / "timeline.json", json.dumps(report, indent=1) + "\n")
        picture = draw_picture(timeline, alone, finished=status == 0, alone_finished=alone_finished)
        _replace(directory / "world.svg", picture)
    except OSError as error:
        click.echo(f"muster: --report {directory}: cannot be written ({error.strerror})", err=True)
        return False
    return True


def _replace(path: Path, text: str) -> None:
    """Write a file and rename it into place, so that a full disk leaves no half-written one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


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
        cells = [" ".join(map(str, numbers))]
        if stepped:
            cells.append(str(max((progress.step for progress in ranks), default="")))
        state = Text(standing.state, style=STYLES.get(standing.state, ""))
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


class Repeats:
    """A filter of moments: it passes each one or leaves it out, and reports what it left out.

    Rounds and errors are equal if they differ only in numbers. Any other moment resets the
    filter: what comes after it is shown again.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], int] = {}
        self._left_out = 0

    def lines(self, moment: Moment) -> list[str]:
        """Return the lines to print for the next moment."""
        if moment.what not in REPEATING:
            self._times.clear()
            return [*self._ending(moment.at_s), str(moment)]
        key = (moment.what, _NUMBER.sub("#", moment.detail))
        self._times[key] = self._times.get(key, 0) + 1
        if self._times[key] <= SHOWN_TIMES:
            return [*self._ending(moment.at_s), str(moment)]
        self._left_out += 1
        return []

    def _ending(self, at_s: float) -> list[str]:
        """Return the line about what has been left out so far, if anything."""
        if not self._left_out:
            return []
        count, self._left_out = self._left_out, 0
        what = "1 more line like this" if count == 1 else f"{count} more lines like these"
        return [f"{at_s:7.1f} s  …          {what}"]


@dataclass(frozen=True, slots=True)
class Standing:
    """The standing of one node: a word or two; ``trains``: its ranks and their step are shown."""

    state: str
    trains: bool = False


def node_standing(
    process: State, name: str, view: JobView | None, *, has_ranks: bool, in_round: bool
) -> Standing:
    """Return the standing of a node.

    ``process`` is the state of its processes, ``view`` the job in the store, None without one.
    ``has_ranks``: live ranks of the node report steps.
    """
    if process not in ("running", "draining"):
        return Standing(process)
    states = {member.name: state for member, state, _ in view.members()} if view else {}
    state = states.get(name)
    if state in ("draining", "drained"):
        return _drain_standing(name, view, leaves=process == "draining", has_ranks=has_ranks)
    if state in ("standby", "quarantined", "excluded"):
        return Standing(state if state != "excluded" else process)
    if has_ranks and (in_round or view is None):
        return Standing("training", trains=True)
    if process == "running" and state == "listed" and not in_round:
        return Standing("waiting")
    return Standing(process, trains=in_round)


def _drain_standing(name: str, view: JobView | None, *, leaves: bool, has_ranks: bool) -> Standing:
    assert view is not None
    drain = view.snapshot.drains.get(view.snapshot.members[name].pod_uid)
    if drain is None:
        return Standing("draining", trains=has_ranks)
    phase = phase_of(view.snapshot, drain, finishing=view.finishes(name))
    if phase.name == "released":
        return Standing("leaving" if leaves else "drained, idle")
    return Standing(phase.name, trains=has_ranks)


def job_standing(view: JobView | None, now_unix_s: float) -> str:
    """Say why no world gets on; empty if one does, or if that is unknown."""
    if view is None:
        return ""
    found = verdict(view, now_unix_s)
    if found.state not in WAITING_STATES:
        return ""
    return f"{found.state}: {found.why}" if found.why else found.state
