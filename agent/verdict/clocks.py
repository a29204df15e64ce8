# SPDX-License-Identifier: Apache-2.0
"""Wrong clocks of a job, found by the order of the store's revisions and the times written."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rdzv.dataclass import dataclass
from rdzv.records.job import Happening, HistoryEntry

SKEW_S = 10.0
"""Differences up to this are not reported: the time is taken before the write, which may wait."""

NEWEST = 4
"""The entries of a member that count: by older ones its clock may have been another."""

NAMED_MAX = 3
"""The most clocks to name."""

_BY_ITSELF: frozenset[Happening] = frozenset({"join", "leave", "round", "closed"})
"""Entries that a member writes of itself, by its own clock; the writer of others is unknown."""

HERE = "this machine"
"""The reader's clock, beside the names of members."""

_Times = Sequence[tuple[float, float]]
"""Of one clock: pairs of the store's revision and the time that was written with it."""


@dataclass(frozen=True, slots=True)
class Skew:
    """A clock that is at least so far ahead of most others, or, if negative, behind.

    ``beside``: the one other clock, if it cannot be known which of the two is wrong.
    """

    of: str
    least_s: float
    beside: str = ""


def skews(history: Sequence[HistoryEntry], now_unix_s: float) -> list[Skew]:
    """Return the clocks that are wrong, the worst first.

    What has the lower revision was written first: by two clocks that agree its time is not later.
    As few clocks as possible are taken to be wrong.
    """
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in sorted(history, key=lambda entry: entry.revision):
        if entry.what in _BY_ITSELF:
            times[entry.member].append((float(entry.revision), entry.at_unix_s))
    known = {member: _since_set(entries)[-NEWEST:] for member, entries in sorted(times.items())}
    apart = _apart({**known, HERE: [(math.inf, now_unix_s)]})
    doubts = {of: (len(others), sum(map(abs, others.values()))) for of, others in apart.items()}
    trusted, even = set(apart), dict[str, str]()
    while left := {of: apart[of].keys() & trusted for of in trusted if apart[of].keys() & trusted}:
        worst = max(sorted(left), key=lambda of: (len(left[of]), doubts[of], of != HERE, of))
        trusted.discard(worst)
        other = min(left[worst])
        if len(left[worst]) == 1 and doubts[other] == doubts[worst]:
            even[worst] = other  # one against one: either may be wrong
    found = []
    for of in apart.keys() - trusted:
        against = {name: apart[of][name] for name in apart[of].keys() & trusted} or apart[of]
        found.append(Skew(of, max(against.values(), key=abs), even.get(of, "")))
    return sorted(found, key=lambda one: (-abs(one.least_s), one.of))


def _apart(times: Mapping[str, _Times]) -> dict[str, dict[str, float]]:
    """Return for each clock the others that contradict it, and how far it is ahead of them."""
    return {
        of: {
            name: least_s
            for name, theirs in times.items()
            if name != of and abs(least_s := _least(own, theirs)) > SKEW_S
        }
        for of, own in times.items()
    }


def _least(own: _Times, theirs: _Times) -> float:
    """Return by how much the own clock is ahead at least, negative if behind, 0 if unknown."""
    ahead_s = max((o - t for s, o in own for r, t in theirs if s < r), default=0.0)
    behind_s = max((t - o for s, o in own for r, t in theirs if r < s), default=0.0)
    return max(ahead_s, 0.0) if ahead_s >= behind_s else -max(behind_s, 0.0)


def _since_set(entries: _Times) -> _Times:
    """Return a member's entries since its clock was last set back."""
    set_back = [n for n in range(1, len(entries)) if entries[n][1] < entries[n - 1][1] - SKEW_S]
    return entries[set_back[-1] if set_back else 0 :]


def sentence(found: Sequence[Skew], nodes: Mapping[str, str]) -> str:
    """Say which clocks are wrong and by how much; ``nodes``: the machine of each member."""
    sentences = []
    for one in found[:NAMED_MAX]:
        node = nodes.get(one.of, "")
        where = f" on {node}" if node not in ("", one.of) else ""
        how = "ahead of" if one.least_s > 0 else "behind"
        whose = f"that of {one.beside}" if one.beside else "most others"
        sentences.append(
            f"the clock of {one.of}{where} is {abs(one.least_s):,.0f} s or more {how} {whose}"
        )
    more = len(found) - NAMED_MAX
    return "; ".join([*sentences, *([f"{more} more clocks are wrong"] if more > 0 else [])])
