# SPDX-License-Identifier: Apache-2.0
"""The standing of one drain: its phase, in words, and whether a launcher may go: pure.

A central launcher has no round whose ranks could agree on a step, and none is needed: its
ranks are in step at each commit of their own, and one of them saves for all. The sidecar of its pod
promises it in the launcher's drain, and then stores there which step was saved. Without a promise
the launcher does not wait for long. If all its hosts make room for other pods, what the ranks have
in memory ends as well: then one of their drains stands for the launcher's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rdzv.dataclass import dataclass
from rdzv.records.drain import Commit, Drain, Outcome
from rdzv.snapshot import Snapshot

FINISHING = "the job is finishing: nothing is to be saved"
"""The reason while first ranks have ended well, and the others are about to."""


def granted(commit: Commit | None, drain: Drain) -> bool:
    """Return whether the drained pod may go, so that SIGTERM is passed."""
    return bool(drain.outcome) or (commit is not None and drain.pod_uid in commit.granted)


def asked(snapshot: Snapshot) -> Drain | None:
    """Return the drain in which a rank is asked to save, even if it is over: the launcher's.

    A drain in progress comes before one that is over, of a launcher that has yet to leave. If no
    launcher drains, but all its hosts make room for other pods, it is the newest of theirs.
    """
    # Search the few launchers, not the many drains: every sidecar does so at each change.
    launchers = [one for one in snapshot.members.values() if one.role == "launcher"]
    found = [snapshot.drains.get(launcher.pod_uid) for launcher in launchers]
    drains = [one for one in found if one is not None and is_of_launcher(snapshot, one)]
    if drains or not launchers:
        return min(drains, key=lambda one: (bool(one.outcome), one.pod_uid), default=None)
    hosts: list[Drain] = []
    for member in snapshot.members.values():
        drain = snapshot.drains.get(member.pod_uid)
        if drain is not None and drain.preempted:
            hosts.append(drain)
        elif member.role != "launcher":
            return None
    return max(hosts, key=lambda one: one.created_revision, default=None)


def ask_of(drain: Drain | None) -> int:
    """Return the number that names this drain to the ranks; 0 for none."""
    return 0 if drain is None else drain.created_revision


def is_withdrawn(snapshot: Snapshot) -> bool:
    """Return whether the launcher is to have no hosts: the job is paused, and no save to come."""
    if snapshot.rules is None or not snapshot.rules.paused:
        return False
    drain = asked(snapshot)
    saves = drain is not None and not drain.outcome
    return not saves and any(one.role == "launcher" for one in snapshot.members.values())


def is_of_launcher(snapshot: Snapshot, drain: Drain) -> bool:
    """Return whether it is the drain of a present central launcher."""
    member = snapshot.members.get(drain.member)
    return member is not None and (member.role, member.pod_uid) == ("launcher", drain.pod_uid)


def answer(
    drain: Drain,
    own: str,
    snapshot: Snapshot,
    *,
    saver: bool,
    answers: Sequence[tuple[int, int]],
) -> Drain | None:
    """Return the launcher's drain with the promise or save of this pod added; None for neither.

    ``own`` is the pod's member. ``saver``: a rank of it saves when it is asked to; ``answers`` are
    the ask and the step of each such save. A promise of a member that is gone may be taken over.

    There is no round whose ranks could agree on a step, and none is needed: a central launcher's
    ranks are in step at their own commits, and one of them saves for all.
    """
    if drain.outcome or drain.step is not None:
        return None
    saved = [step for ask, step in answers if ask == ask_of(drain)]
    if saved:
        return replace(drain, saver=own, step=max(saved))
    promised = drain.saver in snapshot.members
    if not promised and saver:
        return replace(drain, saver=own)
    return None


def released(
    drain: Drain, snapshot: Snapshot, seen_for_s: float, promise_s: float
) -> tuple[Outcome, str]:
    """Return how the launcher's drain ends before its deadline, and why; empty if it does not.

    ``seen_for_s``: for how long its sidecar has seen the drain; ``promise_s``: how long a rank may
    take to promise a save. A promise is as good as none once no worker is left to keep it.
    """
    if drain.step is not None:
        return "committed", f"{drain.saver} has saved step {drain.step}"
    if seen_for_s < promise_s:
        return "", ""
    if not drain.saver:
        return "uncommitted", "no rank has said that it saves for a launcher"
    if all(member.role == "launcher" for member in snapshot.members.values()):
        return "uncommitted", f"{drain.saver} is gone, and no worker is left that could save"
    return "", ""


PhaseName = Literal["draining", "agreeing", "saving", "saved", "finishing", "released"]
"""The name of a phase. ``draining``: delisted, and waiting for the others. ``agreeing``: ranks are
held for a vote. ``saving``: ranks train up to the commit step and save. ``saved``: all have, and
the leave is not granted yet. ``finishing``: the first ranks have ended well, so nothing is to be
saved any more, and the pod has its whole grace. ``released``: the pod may go."""


@dataclass(frozen=True, slots=True)
class DrainPhase:
    """One phase; ``outcome`` is set once the drain is over, ``step`` once one is agreed on."""

    name: PhaseName
    sentence: str
    outcome: Outcome = ""
    step: int | None = None


def phase_of(snapshot: Snapshot, drain: Drain, *, finishing: bool = False) -> DrainPhase:
    """Return the phase of ``drain``; ``snapshot`` has the commit.

    ``finishing``: first ranks of its round have ended well.
    """
    commit = snapshot.commit
    if drain.outcome:
        return DrainPhase("released", _ending(drain), drain.outcome, drain.step)
    if finishing and (commit is None or drain.pod_uid not in commit.saved):
        return DrainPhase("finishing", FINISHING)
    if commit is None or drain.pod_uid not in commit.leaving:
        return DrainPhase("draining", f"{drain.member} is delisted, and no save has begun")
    if granted(commit, drain):
        step = commit.step if drain.pod_uid in commit.saved else None
        outcome: Outcome = "uncommitted" if step is None else "committed"
        return DrainPhase("released", f"{drain.member} may go", outcome, step)
    if commit.phase == "hold":
        return DrainPhase("agreeing", "all ranks are asked to stop at their next step boundary")
    if commit.phase == "commit":
        return DrainPhase("saving", f"all ranks save at step {commit.step}", step=commit.step)
    if commit.phase == "done":
        return DrainPhase("saved", f"step {commit.step} is saved: {commit.reason}", "", commit.step)
    return DrainPhase("draining", commit.reason or f"{drain.member} is delisted")


def _ending(drain: Drain) -> str:
    if drain.outcome == "committed":
        if drain.step is None:
            return f"{drain.member} may go: its launcher has let it go, and no work is lost"
        return f"{drain.member} may go: all ranks saved step {drain.step}"
    if drain.outcome == "expired":
        why = f": {drain.cause}" if drain.cause else ""
        return f"the drain of {drain.member} has expired before all ranks had saved{why}"
    return f"{drain.member} may go: there was nothing to save, or a rank takes no part in saving"
