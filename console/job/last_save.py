# SPDX-License-Identifier: Apache-2.0
"""What a job has saved last, and how many steps it would train again: for people."""

from __future__ import annotations

from dataclasses import dataclass

NAMED_MAX = 3
"""So many members are named of those that have saved something newer."""


@dataclass(frozen=True, slots=True)
class LastSave:
    """``step``: the newest that all ranks have saved, None for none; ``periodic``: without a drain.

    ``newest``: a later one that not all have saved, those of ``newest_of`` have; else None.
    ``seen_step`` is the furthest that the world was seen at, None while it is not told. Times are
    of the wall clocks of who wrote it, 0.0 where that was not told.
    """

    step: int | None
    at_unix_s: float = 0.0
    periodic: bool = False
    newest: int | None = None
    newest_of: tuple[str, ...] = ()
    seen_step: int | None = None
    seen_at_unix_s: float = 0.0

    @property
    def steps_at_risk(self) -> int | None:
        """How many steps would be trained again, as far as is known; None where no world tells."""
        if self.seen_step is None:
            return None
        return max(0, self.seen_step - (self.step or 0))

    def sentence(self, now_unix_s: float) -> str:
        """Say it in a line."""
        saved = "no step is saved by all ranks"
        if self.step is not None:
            cause = "periodic save" if self.periodic else "commit"
            saved = f"step {self.step:,} by all ranks ({cause}{_ago(self.at_unix_s, now_unix_s)})"
        parts = [f"last save: {saved}"]
        if self.newest is not None:
            names = ", ".join(self.newest_of[:NAMED_MAX])
            more = len(self.newest_of) - NAMED_MAX
            names += f" and {more} more" if more > 0 else ""
            parts.append(f"step {self.newest:,} not by all ranks yet (by {names})")
        at_risk = self.steps_at_risk
        if at_risk is not None:
            seen = _ago(self.seen_at_unix_s, now_unix_s)
            parts.append(f"{at_risk:,} steps at risk (at step {self.seen_step:,}{seen})")
        return "; ".join(parts)

    def as_json(self) -> dict[str, object]:
        """Give its fields."""
        newer = self.newest is not None
        return {
            "step": self.newest if newer else self.step,
            "by_all_ranks": not newer,
            "at_unix_s": None if newer else self.at_unix_s or None,
            "step_of_all_ranks": self.step,
            "periodic": self.periodic,
            "seen_step": self.seen_step,
            "seen_at_unix_s": self.seen_at_unix_s or None,
            "steps_at_risk": self.steps_at_risk,
        }


def _ago(at_unix_s: float, now_unix_s: float) -> str:
    return f", {max(0.0, now_unix_s - at_unix_s):,.0f} s ago" if at_unix_s else ""
