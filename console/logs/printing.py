# SPDX-License-Identifier: Apache-2.0
"""The lines of a job as they are printed: each with its ranks, and a line between worlds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from console.logs.lines import Line, shown
from console.logs.ranks import NOBODY, Origin, Seating
from console.logs.worlds import PastWorld, begun, worlds
from rdzv.errors import ConfigError
from rdzv.records.history import ROUNDS_PER_LIFE, HistoryEntry

ENTRIES_MAX = 1000
"""The most entries of the history to keep: more than a store has."""

NOW = -1
"""The present world, and those after it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The lines to show: of ``rank`` (None: all), and of ``world`` (None: all, or ``NOW``)."""

    rank: int | None = None
    world: int | None = None

    @property
    def all(self) -> bool:
        """Whether no line is left out."""
        return self.rank is None and self.world is None


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """One line to print; ``origin`` None: it announces a world."""

    text: str
    origin: Origin | None = None

    def __str__(self) -> str:
        return self.text if self.origin is None else f"{self.origin.label} {self.text}"


@dataclass(slots=True)
class Pages:
    """The lines of a job, world after world.

    ``take_in`` and ``seat`` may be called again as the history grows, and more is known of slots.
    """

    wanted: Selection = field(default_factory=Selection)
    worlds: list[PastWorld] = field(default_factory=list)
    _history: dict[tuple[int, str, str], HistoryEntry] = field(default_factory=dict)
    _slots: dict[str, int] = field(default_factory=dict)
    _members: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _seatings: dict[int, Seating] = field(default_factory=dict)
    _announced: int = 0
    """The revision of the world that was announced last."""
    _from: int = 0
    """The revision of the first world to show."""

    def take_in(self, entries: Iterable[HistoryEntry]) -> bool:
        """Take in entries of the history; return whether a world has begun or ended."""
        newest = self.worlds[-1].revision if self.worlds else 0
        self._history |= {(one.revision, one.member, one.what): one for one in entries}
        for key in sorted(self._history)[:-ENTRIES_MAX]:
            del self._history[key]
        self.worlds = worlds(tuple(self._history.values()))
        self._seatings.clear()
        return bool(self.worlds) and self.worlds[-1].revision > newest

    def seat(
        self, slots: Mapping[str, int], present: Mapping[int, tuple[str, ...]] | None = None
    ) -> None:
        """Take in the number of ranks of each member; it stays known of those that have gone.

        ``present``: the members of the worlds of some rounds, in rank order: older sidecars do not
        name them in the history.
        """
        self._slots |= slots
        for number, members in (present or {}).items():
            self._members[number % ROUNDS_PER_LIFE] = members
        self._seatings.clear()

    def begin(self) -> None:
        """Note that the worlds up to now are known. Raises ``ConfigError`` for a world unknown."""
        wanted = self.wanted.world
        if wanted == NOW:
            self._from = self.worlds[-1].revision if self.worlds else 0
        elif wanted is not None and not any(self._is_wanted(at) for at in range(len(self.worlds))):
            known = ", ".join(str(one.number) for one in self.worlds if not one.closed)
            raise ConfigError(
                f"--world {wanted}: no world of that number is in the history"
                + (f", which has {known}" if known else "")
            )

    def print(self, line: Line) -> Iterator[PrintedLine]:
        """Yield what to print for a line: the worlds that have begun before it, and the line."""
        at = begun(self.worlds, line.at_unix_ns / 1e9)
        yield from self._announce(at)
        if not self._is_wanted(at - 1):
            return
        seating = self._seating(at - 1)
        origin, text = seating.origin(line.source, line.text)
        if self.wanted.all or seating.has(origin, self.wanted.rank):
            yield PrintedLine(shown(text), origin)

    def rest(self) -> Iterator[PrintedLine]:
        """Yield the announcements of the worlds that no line has come from yet."""
        yield from self._announce(len(self.worlds))

    def _announce(self, until: int) -> Iterator[PrintedLine]:
        if until == 0 or self.worlds[until - 1].revision <= self._announced:
            return
        before, self._announced = self._announced, self.worlds[until - 1].revision
        for at, world in enumerate(self.worlds[:until]):
            if world.revision > before and self._is_wanted(at):
                yield PrintedLine(shown(world.title))  # it has the words of failures

    def _is_wanted(self, at: int) -> bool:
        """Return whether the world of this index is wanted; -1: what is before the first one."""
        wanted = self.wanted.world
        if wanted is None or (wanted == NOW and not self._from):
            return True
        if at < 0:
            return False
        if wanted == NOW:
            return self.worlds[at].revision >= self._from
        return self.worlds[at].number == wanted % ROUNDS_PER_LIFE

    def _seating(self, at: int) -> Seating:
        if at < 0:
            return NOBODY
        if at not in self._seatings:
            world = self.worlds[at]
            members = world.members or self._members.get(world.number, ())
            self._seatings[at] = Seating.of(members, self._slots)
        return self._seatings[at]


def world_of(text: str | None) -> int | None:
    """Read ``--world``: ``now`` or a round's number; None if it is not given."""
    if text is None:
        return None
    if text == "now":
        return NOW
    if text.isdecimal():
        return int(text)
    raise ConfigError(f"--world {text!r}: give now, or the number of a round, such as 3")


def first_failure(history: Sequence[HistoryEntry]) -> HistoryEntry | None:
    """Return the failure that came first in the newest round that has one; None for none."""
    failed = [one for one in history if one.what == "failed"]
    if not failed:
        return None
    newest = max(failed, key=lambda one: one.revision).details.get("round")
    same = [one for one in failed if one.details.get("round") == newest]
    return min(same, key=lambda one: one.revision)
