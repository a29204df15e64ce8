# SPDX-License-Identifier: Apache-2.0
"""The worlds of a job, one after the other, as its history has them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rdzv.records.history import ROUNDS_PER_LIFE, HistoryEntry
from rdzv.sentences import counted

NAMED_MAX = 4
"""The most members to name in one line."""

ERROR_MAX = 80
"""The longest error in a line between worlds, in characters; ``--why`` has the whole one."""


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
