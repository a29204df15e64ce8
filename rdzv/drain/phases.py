# SPDX-License-Identifier: Apache-2.0
"""The phase of one drain, in a word and a sentence: pure, and the same for every observer."""

from __future__ import annotations

from typing import Literal

from rdzv.dataclass import dataclass
from rdzv.drain.decision import FINISHING, granted
from rdzv.records.drain import Drain, Outcome
from rdzv.snapshot import Snapshot

Name = Literal["draining", "agreeing", "saving", "saved", "finishing", "released"]
"""The name of a phase. ``draining``: delisted, and waiting for the others. ``agreeing``: ranks are
held for a vote. ``saving``: ranks train up to the commit step and save. ``saved``: all have, and
the leave is not granted yet. ``finishing``: the first ranks have ended well, so nothing is to be
saved any more, and the pod has its whole grace. ``released``: the pod may go."""


@dataclass(frozen=True, slots=True)
class DrainPhase:
    """One phase; ``outcome`` is set once the drain is over, ``step`` once one is agreed on."""

    name: Name
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
