# SPDX-License-Identifier: Apache-2.0
"""The standing of nodes and job, in words: what each node does, and what a run waits for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent.verdict.decision import verdict
from agent.verdict.states import STATES
from agent.verdict.view import JobView
from console.local.node import State
from rdzv.drain.standing import phase_of
from rdzv.sentences import counted

WAITING_STATES = frozenset(state for state, row in STATES.items() if row.level != "ok")
"""States of a job in which no world gets on."""


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


def awaited(view: JobView | None, coming: str) -> str:
    """Say what a job waits for that has fewer nodes than the smallest world; empty if it has not.

    ``coming``: the next event, with its time; empty for none.
    """
    rules = view.snapshot.rules if view is not None else None
    if view is None or rules is None or rules.paused:
        return ""
    here, least = len(view.listing.listed), rules.policy.smallest
    states = {member.name: state for member, state, _ in view.members()}
    if here >= least or "draining" in states.values():
        return ""
    idle = [name for name, state in states.items() if state == "drained"]
    left = f"{counted(here, 'node')} left" if here else "no node is left"
    sentences = [f"nothing can train: {left} (min {least})"]
    if idle:
        are = "is" if len(idle) == 1 else "are"
        sentences.append(
            f"{_listed(idle)} {are} drained (muster drain {idle[0]} --cancel takes it back)"
        )
    if not coming and here:
        sentences.append(f"muster set --min {here} trains with fewer")
    sentences.append(f"next: {coming}" if coming else "Ctrl-C ends the run")
    return "; ".join(sentences)


def _listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def styles() -> Mapping[str, str]:
    """Return the colour of each state that has one: readable on dark and light backgrounds."""
    return _STYLES


_GOOD, _CHANGING = "green4", "dark_orange3"

_STYLES = {
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
