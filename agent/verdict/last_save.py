# SPDX-License-Identifier: Apache-2.0
"""A job's last save and its steps at risk, for display."""

from __future__ import annotations

from collections.abc import Sequence

from launcher_shim.c10d.rounds.records import Round
from rdzv.dataclass import dataclass
from rdzv.records.drain import LastCommit, verdict
from rdzv.records.progress import CENTRAL_RUN, PodSaves
from rdzv.sentences import duration

LATE_S = 30.0
"""Time from the first members' save of a step until the others are late, in seconds: reports come
within some seconds of a save."""

NAMED_MAX = 3
"""The most members to name."""


@dataclass(frozen=True, slots=True)
class LastSave:
    """The newest saved step of a job, and the steps since.

    ``step``: the newest that all ranks have saved, or None; ``periodic``: no commit asked for it.
    ``tag``: the save tag in the path of its checkpoint, empty if the script has a name of its own.
    ``samples``: whether it keeps the samples, and why not; empty without a step.
    ``newest``: a later step that some members have saved, or None, at ``newest_at_unix_s`` or
    before; ``awaited``: the others of their world. ``overtaken``: those of them that have not
    reported the save before it either. ``seen_step``: the furthest step that the world has
    reported, or None. Times are by the writer's wall clock, 0.0 if unknown. ``finishing``: first
    ranks have ended well, so nothing is to be saved any more. ``by_script``: ranks of a central
    launcher do not report what they save.
    """

    step: int | None
    at_unix_s: float = 0.0
    periodic: bool = False
    newest: int | None = None
    newest_at_unix_s: float = 0.0
    awaited: tuple[str, ...] = ()
    overtaken: tuple[str, ...] = ()
    seen_step: int | None = None
    seen_at_unix_s: float = 0.0
    finishing: bool = False
    by_script: bool = False
    tag: str = ""
    samples: str = ""

    @property
    def steps_at_risk(self) -> int | None:
        """The steps that would be trained again, as far as known; None if no world reports any."""
        if self.seen_step is None or (self.by_script and self.step is None):
            return None
        if self.finishing:
            return 0
        return max(0, self.seen_step - (self.step or 0))

    def sentence(self, now_unix_s: float) -> str:
        """Describe the last save and the steps at risk in one line."""
        saved = "unknown, the script saves by itself" if self.by_script else "NOT SAVED YET"
        if self.step is not None:
            cause = "periodic save" if self.periodic else "commit"
            tag = f", {self.tag}" if self.tag else ""
            ago = _ago(self.at_unix_s, now_unix_s)
            saved = f"step {self.step:,} by all ranks ({cause}{tag}{ago})"
        parts = [f"last save: {saved}"]
        if late := self.late(now_unix_s):
            parts.append(late)
        at_risk, seen = self.steps_at_risk, _ago(self.seen_at_unix_s, now_unix_s)
        if self.finishing:
            parts.append("the job is finishing: nothing is to be saved")
        elif at_risk is not None:
            parts.append(f"{at_risk:,} steps at risk (at step {self.seen_step:,}{seen})")
        elif self.seen_step is not None:
            parts.append(f"at step {self.seen_step:,}{seen}")
        if self.samples:
            parts.append(f"samples: {self.samples}")
        return "; ".join(parts)

    def late(self, now_unix_s: float) -> str:
        """Name the members that should have saved the newest step by now; empty if all have."""
        if self.newest is None:
            return ""
        over = self.newest_at_unix_s and now_unix_s - self.newest_at_unix_s >= LATE_S
        members = self.awaited if over else self.overtaken
        if not members:
            return ""
        more = len(members) - NAMED_MAX
        names = ", ".join(members[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        return f"step {self.newest:,} is not saved by all ranks: {names} missing"

    def as_json(self) -> dict[str, object]:
        """Return the fields for JSON output; ``step`` is the newest saved by any rank."""
        newer = self.newest is not None
        return {
            "step": self.newest if newer else self.step,
            "by_all_ranks": not newer,
            "at_unix_s": None if newer else self.at_unix_s or None,
            "step_of_all_ranks": self.step,
            "step_of_all_ranks_at_unix_s": self.at_unix_s or None,
            "waits_for": list(self.awaited),
            "periodic": self.periodic,
            "tag": self.tag or None,
            "samples": self.samples or None,
            "seen_step": self.seen_step,
            "seen_at_unix_s": self.seen_at_unix_s or None,
            "steps_at_risk": self.steps_at_risk,
        }


def last_save(last: LastCommit | None, told: Sequence[PodSaves], world: Round) -> LastSave | None:
    """Return the last save and the steps since, by what the pods of ``world`` have told.

    ``last``: the newest save of all ranks of its run. None if nothing is known.
    """
    if last is None and not told:
        return None
    furthest = max(told, key=lambda one: one.step, default=None)
    step = -1 if last is None else last.step
    newest = max((one.newest for one in told if one.newest is not None), default=step)
    ahead = [one for one in told if one.newest == newest]
    named = {one.member for one in ahead}
    behind = [seat.member for seat in world.frozen if seat.member not in named]
    before = max((s for one in ahead for s in one.steps if step < s < newest), default=step)
    caught_up = {one.member for one in told if (one.newest or 0) >= before}
    return LastSave(
        step=None if last is None else last.step,
        at_unix_s=0.0 if last is None else last.at_unix_s,
        periodic=last is not None and last.periodic,
        newest=newest if newest > step else None,
        newest_at_unix_s=min((one.at_unix_s for one in ahead), default=0.0),
        awaited=tuple(behind),
        overtaken=tuple(name for name in behind if before > step and name not in caught_up),
        finishing=world.finishing,
        by_script=any(one.run == CENTRAL_RUN for one in told),
        seen_step=None if furthest is None or furthest.step < 0 else furthest.step,
        seen_at_unix_s=0.0 if furthest is None else furthest.at_unix_s,
        tag="" if last is None else last.tag,
        samples="" if last is None else verdict(last.samples, last.cursor),
    )


def _ago(at_unix_s: float, now_unix_s: float) -> str:
    return f", {duration(max(0.0, now_unix_s - at_unix_s))} ago" if at_unix_s else ""
