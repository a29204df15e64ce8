# SPDX-License-Identifier: Apache-2.0
"""The lines of a job as they are printed: each with its ranks, and a line between worlds. Pure.

The worlds, one after the other, are those of the job's history.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from console.logs.lines import NOBODY, Line, Origin, Seating, Source, shown
from rdzv.errors import ConfigError
from rdzv.records.job import ROUNDS_PER_LIFE, HistoryEntry
from rdzv.sentences import counted

NAMED_MAX = 4
"""The most members to name in one line."""

ERROR_MAX = 80
"""The longest error in a line between worlds, in characters; ``--why`` has the whole one."""

ENTRIES_MAX = 1000
"""The most entries of the history to keep: more than a store has."""

CLOCKS_S = 10.0
"""The difference of two clocks up to which ``muster doctor`` says nothing."""

NOW = -1
"""The present world, and those after it."""


@dataclass(frozen=True, slots=True)
class PastWorld:
    """One world, or what follows the last one (``closed``: why there is none).

    ``members`` are in rank order; empty if they are unknown. ``title`` is the line that announces
    it. ``began_unix_s`` is by the clock of the member that wrote it, but not before the world
    before it.
    """

    number: int
    began_unix_s: float
    nodes: int
    members: tuple[str, ...]
    title: str
    revision: int
    closed: str = ""


@dataclass(frozen=True, slots=True)
class _Change:
    """The entries between two worlds: who came and went, and how."""

    gone: Mapping[str, str]
    came: tuple[str, ...]
    notes: tuple[str, ...]
    broken: bool
    """Whether a member was lost or failed, so that steps since the last save may be lost."""
    step: int | None
    """The step that a drain had all ranks save."""


def worlds(history: Sequence[HistoryEntry]) -> list[PastWorld]:
    """Return the worlds of a job, the oldest first."""
    found: list[PastWorld] = []
    between: list[HistoryEntry] = []
    for entry in sorted(history, key=lambda one: one.revision):
        if entry.what not in ("round", "closed") or "nodes" not in entry.details:
            between.append(entry)
            continue
        before = found[-1] if found else None
        world = _world(before, entry, _change(before, between))
        if before is not None:
            world = replace(world, began_unix_s=max(world.began_unix_s, before.began_unix_s))
        found.append(world)
        between.clear()
    return found


def begun(known: Sequence[PastWorld], at_unix_s: float) -> int:
    """Return the number of worlds that had begun by then."""
    return bisect_right(known, at_unix_s, key=lambda world: world.began_unix_s)


def _world(before: PastWorld | None, entry: HistoryEntry, change: _Change) -> PastWorld:
    nodes, number, at = _count(entry, "nodes"), _count(entry, "round"), entry.revision
    shown = number % ROUNDS_PER_LIFE
    listed = entry.details.get("members")
    members = tuple(map(str, listed)) if isinstance(listed, list) else ()
    if entry.what == "closed":
        here = before.members if before is not None else members
        return PastWorld(shown, entry.at_unix_s, nodes, here, f"── {entry.why} ──", at, entry.why)
    if before is None or before.closed:
        names = f": {named(members)}" if members else ""
        title = f"── world of {counted(nodes, 'node')}{names} (round {shown}) ──"
        return PastWorld(shown, entry.at_unix_s, nodes, members, title, at)
    title = f"── world {before.nodes} → {nodes}{_why(before, entry, members, change)}"
    title += f" (round {shown}) ──"
    return PastWorld(shown, entry.at_unix_s, nodes, members, title, at)


def _why(before: PastWorld, entry: HistoryEntry, members: tuple[str, ...], change: _Change) -> str:
    """Return the middle of a title: `` at step 45: b left, 0 lost``."""
    gone, came = dict(change.gone), change.came
    if members and before.members:
        absent = [name for name in before.members if name not in members]
        gone = {name: gone.get(name, "left") for name in (*absent, *_failed(gone))}
        came = tuple(name for name in members if name not in before.members)
    parts = [f"{named(names)} {how}" for how, names in _by_fate(gone).items()]
    parts += [f"{named(came)} joined"] if came else []
    parts += change.notes if not parts else []
    from_step = entry.details.get("step")
    saved = entry.details.get("saved_round")
    step = change.step if change.step is not None else from_step
    whole = not change.broken and (change.step is not None or _is_of(saved, before.number))
    if whole and isinstance(step, int):
        return f" at step {step:,}: {', '.join([*parts, '0 lost'])}"
    if isinstance(from_step, int) and from_step >= 0:
        parts.append(f"from step {from_step:,}")
    return f": {', '.join(parts)}" if parts else ""


def _change(before: PastWorld | None, entries: Iterable[HistoryEntry]) -> _Change:
    gone: dict[str, str] = {}
    came: dict[str, None] = {}
    notes: list[str] = []
    broken, step = False, None
    for entry in entries:
        match entry.what:
            case "drain" if (outcome := entry.details.get("outcome")) != "cancelled":
                gone[entry.member] = "left" if outcome == "committed" else f"left ({outcome})"
                committed = entry.details.get("step")
                if outcome == "committed" and isinstance(committed, int):
                    step = committed
                else:
                    broken = True
            case "leave":
                gone.setdefault(entry.member, "left")
            case "lost":
                gone[entry.member], broken = "was lost", True
            case "failed":
                error = entry.why if len(entry.why) <= ERROR_MAX else f"{entry.why[:ERROR_MAX]}…"
                gone[entry.member], broken = f"failed ({error})", True
            case "join":
                came[entry.member] = None
            case "quarantine" | "admit" | "set" | "pause" | "resume":
                notes.append(f"{entry.what}: {entry.why}")
    here = before.members if before is not None else ()
    new = tuple(name for name in came if name not in here)
    return _Change(gone, new, tuple(notes[-1:]), broken, step)


def _failed(gone: Mapping[str, str]) -> list[str]:
    return [name for name, how in gone.items() if how.startswith("failed")]


def _by_fate(gone: Mapping[str, str]) -> dict[str, list[str]]:
    fates: dict[str, list[str]] = {}
    for name, how in gone.items():
        fates.setdefault(how, []).append(name)
    return fates


def named(names: Sequence[str]) -> str:
    """Return names for one line: the first ones, and the number of the rest."""
    rest = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")


def _is_of(saved_round: object, number: int) -> bool:
    return isinstance(saved_round, int) and saved_round % ROUNDS_PER_LIFE == number


def _count(entry: HistoryEntry, name: str) -> int:
    value = entry.details.get(name)
    return value if isinstance(value, int) else 0


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

    def gone(self, created_unix_s: Mapping[str, float]) -> Iterator[str]:
        """Yield a sentence for each member of a wanted rank or world whose pod is gone.

        A member's lines are its pod's: without it, nothing may stand where lines were asked for.
        ``created_unix_s``: when each present pod was made; one that was made after a world began is
        another pod of that name.
        """
        for at, world in enumerate(self.worlds):
            if self.wanted.all or world.closed or not self._is_wanted(at):
                continue
            seating = self._seating(at)
            for name in seating.seats:
                origin, _ = seating.origin(Source(name), "")
                made_s = created_unix_s.get(name, math.inf)
                if made_s > world.began_unix_s + CLOCKS_S and seating.has(origin, self.wanted.rank):
                    yield (
                        f"the pod that was {name}, {origin.label} in world {world.number}, is gone,"
                        " and its log with it"
                    )

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
