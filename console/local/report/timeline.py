# SPDX-License-Identifier: Apache-2.0
"""The moments of a run, in order: the lines shown, the text at the end, and its JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from console.local.report.worlds import Worlds

SCHEMA = 1

FINISHED = "job finished"
"""The detail of the moment ``closed`` of a job that ended well."""

_DISTURBANCES = ("leave", "lost", "released", "drained", "killed", "error")

Kind = Literal["event", "node", "membership", "round", "training", "end"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened. ``kind`` is its group; ``what`` is one word.

    ``asked``: of an event, as the user wrote it: two runs may have it hit nodes of other names.
    """

    at_s: float
    kind: Kind
    what: str
    who: str
    detail: str
    had_effect: bool = True
    asked: str = ""

    @property
    def disturbs(self) -> bool:
        """Whether it may keep a world from training on."""
        if self.kind == "event":
            return self.had_effect and self.what not in ("add", "cont", "kill-sidecar")
        return self.what in _DISTURBANCES

    @property
    def label(self) -> str:
        """A short name of what was done, and to whom: that of a drain by hand is of its release."""
        what = "drain" if self.what == "released" else self.what
        who = "" if self.what in ("pause", "resume", "set") else self.who
        return f"{what} {who}".strip()

    def to_json(self) -> dict[str, object]:
        """Return the moment's fields for JSON output."""
        return {
            "at_s": round(self.at_s, 3),
            "kind": self.kind,
            "what": self.what,
            "who": self.who,
            "detail": self.detail,
        }

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.what:<10} {self.who:<9} {self.detail}".rstrip()


class Timeline:
    """The collected moments; ``clock`` is monotonic, and ``on_record`` is called with each one.

    ``rounds`` are (seconds since the start, ranks that the rendezvous agreed on; 0: none agreed).
    """

    def __init__(self, clock: Callable[[], float], on_record: Callable[[Moment], None]) -> None:
        self._clock = clock
        self._started_s = clock()
        self._on_record = on_record
        self.moments: list[Moment] = []
        self.worlds = Worlds()
        self.rounds: list[tuple[float, int]] = []

    def now_s(self) -> float:
        """Return the seconds since the run began."""
        return self._clock() - self._started_s

    def record(
        self,
        kind: Kind,
        what: str,
        who: str,
        detail: str,
        *,
        had_effect: bool = True,
        asked: str = "",
    ) -> None:
        """Add a moment that happens now; an event may have had no effect."""
        moment = Moment(self.now_s(), kind, what, who, detail, had_effect, asked)
        self.moments.append(moment)
        self._on_record(moment)

    def record_round(self, ranks: int) -> None:
        """Note that the rendezvous agrees on this number of ranks from now on."""
        if (self.rounds[-1][1] if self.rounds else 0) != ranks:
            self.rounds.append((self.now_s(), ranks))

    @property
    def events_without_effect(self) -> list[Moment]:
        """The events that did nothing: their node was not there, or their world never formed."""
        return [moment for moment in self.moments if not moment.had_effect]

    def trusted_until(self, begin_s: float, end_s: float) -> float:
        """Return the time until which a round without reported steps surely trained.

        That is its first disturbance, or ``end_s`` if there was none.
        """
        disturbed = (moment.at_s for moment in self.moments if moment.disturbs)
        return next((at_s for at_s in disturbed if begin_s < at_s < end_s), end_s)

    def disturbed_since(self, at_s: float) -> bool:
        """Return whether an event or a departure, not just a script's error, followed ``at_s``."""
        return any(
            moment.disturbs and moment.what != "error"
            for moment in self.moments
            if moment.at_s >= at_s
        )

    def to_json(self, command: tuple[str, ...], status: int) -> dict[str, object]:
        """Return the timeline for JSON output, with the command and its exit status."""
        return {
            "schema": SCHEMA,
            "command": command,
            "status": status,
            "duration_s": round(self.now_s(), 3),
            "moments": [moment.to_json() for moment in self.moments],
            "rounds": [[round(at_s, 3), ranks] for at_s, ranks in self.rounds],
            "worlds": [
                {
                    "size": world.size,
                    "points": [[round(at_s, 3), step] for at_s, step in world.points],
                }
                for world in self.worlds.all
            ],
        }
