# SPDX-License-Identifier: Apache-2.0
"""What happened during a run, in order: the lines shown, the text at the end, and its JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from console.local.report.worlds import Worlds

SCHEMA = 1

_STEPS_OF_A_START = ("start", "ready", "launched")

Kind = Literal["event", "node", "membership", "round", "training", "end"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened. ``kind`` groups what belongs together; ``what`` is one word."""

    at_s: float
    kind: Kind
    what: str
    who: str
    detail: str

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.what:<10} {self.who:<9} {self.detail}".rstrip()


class Timeline:
    """Collects moments; ``clock`` is monotonic and ``tell`` is called with each one.

    ``rounds`` are (seconds since the start, ranks that the rendezvous agreed on; 0: none agreed).
    """

    def __init__(self, clock: Callable[[], float], tell: Callable[[Moment], None]) -> None:
        self._clock = clock
        self._started_s = clock()
        self._tell = tell
        self.moments: list[Moment] = []
        self.worlds = Worlds()
        self.rounds: list[tuple[float, int]] = []

    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._started_s

    def record(self, kind: Kind, what: str, who: str, detail: str) -> None:
        """Add a moment that happens now."""
        moment = Moment(self.now_s(), kind, what, who, detail)
        self.moments.append(moment)
        self._tell(moment)

    def record_round(self, ranks: int) -> None:
        """Note that the rendezvous agrees on so many ranks from now on."""
        if (self.rounds[-1][1] if self.rounds else 0) != ranks:
            self.rounds.append((self.now_s(), ranks))

    def text(self) -> str:
        """The timeline for people: without the steps of a node's start, which were shown."""
        lines = ["   time     event      who       what"]
        lines += [str(moment) for moment in self.moments if moment.what not in _STEPS_OF_A_START]
        return "\n".join(lines)

    def to_json(self, command: tuple[str, ...], status: int) -> dict[str, object]:
        """The timeline for programs."""
        return {
            "schema": SCHEMA,
            "command": command,
            "status": status,
            "duration_s": round(self.now_s(), 3),
            "moments": [
                {
                    "at_s": round(moment.at_s, 3),
                    "kind": moment.kind,
                    "what": moment.what,
                    "who": moment.who,
                    "detail": moment.detail,
                }
                for moment in self.moments
            ],
            "rounds": [[round(at_s, 3), ranks] for at_s, ranks in self.rounds],
            "worlds": [
                {
                    "size": world.size,
                    "points": [[round(at_s, 3), step] for at_s, step in world.points],
                }
                for world in self.worlds.all
            ],
        }
