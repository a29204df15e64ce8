# SPDX-License-Identifier: Apache-2.0
"""The agreement of all ranks that have saved a step on what they say of it: pure.

They say where in the data it is (the cursor), which world's path they saved to (the tag), and
whether it keeps the samples: a world that goes on from it then trains each once an epoch.

A step whose ranks are at different places in the data is no place to resume from: in the next world
some samples would be trained twice, and others never. A rank that gives no cursor leaves it to the
others, as when rank 0 alone saves and reports: it does not contradict them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rdzv.records.codec import KEPT

CURSORS = "the data cursors of step "
TAGS = "the save tags of step "
DIFFER = (CURSORS, TAGS)
"""The starts of the sentences about a difference."""

NO_CURSOR = "not kept: the script gives no data cursor (it may keep its own place)"
NO_VERDICT = "not kept: an older version saved it, which does not say"

SHOWN_GROUPS = 3
SHOWN_CHARACTERS = 80
"""The number of different cursors that the sentence shows, and the characters of each."""


def difference(
    step: int, given: Iterable[tuple[Sequence[int], str, str]], what: str = CURSORS
) -> str:
    """Return a sentence that names who gave which cursor; empty if all that gave one agree.

    ``given`` are the numbers of ranks, the member they are of, and what they gave: by default
    their cursor.
    """
    by_cursor: dict[str, list[tuple[Sequence[int], str]]] = {}
    for ranks, member, cursor in given:
        if cursor:
            by_cursor.setdefault(cursor, []).append((ranks, member))
    if len(by_cursor) < 2:
        return ""
    groups = sorted(by_cursor.items(), key=lambda group: (min(group[1]), group[0]))
    shown = [
        f"{_who(who)} gave {cursor[:SHOWN_CHARACTERS]}" for cursor, who in groups[:SHOWN_GROUPS]
    ]
    more = [f"and {len(groups) - SHOWN_GROUPS} others"] if len(groups) > SHOWN_GROUPS else []
    return f"{what}{step} differ: {', '.join(shown + more)}"


def left_to_others(given: Iterable[tuple[Sequence[int], str, str]]) -> str:
    """Return who gave no cursor while others gave one, to end a sentence with; empty for none.

    A sidecar of an earlier version names no ranks, and does not report what they gave: it is
    omitted.
    """
    said = list(given)
    none = [(ranks, member) for ranks, member, cursor in said if ranks and not cursor]
    if not none or not agreed(said):
        return ""
    return f"; {_who(none)} gave no data cursor, which is left to the others"


def _who(who: Sequence[tuple[Sequence[int], str]]) -> str:
    ranks = sorted({rank for numbers, _ in who for rank in numbers})
    members = list(dict.fromkeys(member for _, member in who))
    names = ", ".join(members[:3]) + (", ..." if len(members) > 3 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {spell(ranks)} ({names})"


def spell(ranks: Sequence[int]) -> str:
    """Render numbers of ranks in short: ``0-3, 6``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)


def agreed(given: Iterable[tuple[Sequence[int], str, str]]) -> str:
    """Return the cursor that all gave, provided that there is no ``difference``; empty for none."""
    return next((cursor for _, _, cursor in given if cursor), "")


def samples_of(said: Iterable[str]) -> str:
    """Return what ranks or pods say of the samples together; empty if they say nothing.

    One that does not keep them counts for all. One that says nothing leaves it to the others.
    """
    verdicts = sorted(filter(None, said))
    return next((one for one in verdicts if one != KEPT), verdicts[0] if verdicts else "")


def verdict(samples: str, cursor: str) -> str:
    """Return whether a commit keeps the samples, and why not: it has a verdict in any case."""
    return samples or (NO_VERDICT if cursor else NO_CURSOR)
