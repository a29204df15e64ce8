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
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from rdzv.records.codec import KEPT
from rdzv.records.commit import LastCommit
from rdzv.records.progress import RankProgress

CURSORS = "the data cursors of step "
TAGS = "the save tags of step "
DIFFER = (CURSORS, TAGS)
"""The starts of the sentences about a difference."""

NO_CURSOR = "not kept: the script gives no data cursor (it may keep its own place)"
NO_VERDICT = "not kept: an older version saved it, which does not say"

SHOWN_GROUPS = 3
SHOWN_CHARACTERS = 80
"""The number of different cursors that the sentence shows, and the characters of each."""


class Said(NamedTuple):
    """The words of one member's ranks on a step that they have saved; each empty for nothing."""

    ranks: Sequence[int]
    """Their numbers. A sidecar of an earlier version names none."""
    member: str
    cursor: str
    tag: str = ""
    samples: str = ""

    @classmethod
    def by(cls, rank: RankProgress, step: int, member: str) -> Said:
        """Return what ``rank``, which is of ``member``, says of its save of ``step``."""
        return cls((rank.rank,), member, rank.cursor_of(step), rank.tag, rank.samples)


def difference(step: int, said: Sequence[Said]) -> str:
    """Return a sentence that names who gave which cursor, or tag; empty if all that did agree."""
    for what, given in ((CURSORS, attrgetter("cursor")), (TAGS, attrgetter("tag"))):
        by_value: dict[str, list[Said]] = {}
        for one in filter(given, said):
            by_value.setdefault(given(one), []).append(one)
        if len(by_value) > 1:
            groups = sorted(by_value.items(), key=lambda group: (min(group[1]), group[0]))
            shown = [f"{_who(who)} gave {value[:SHOWN_CHARACTERS]}" for value, who in groups]
            more = [f"and {len(shown) - SHOWN_GROUPS} others"] if len(shown) > SHOWN_GROUPS else []
            return f"{what}{step} differ: {', '.join(shown[:SHOWN_GROUPS] + more)}"
    return ""


def left_to_others(said: Sequence[Said]) -> str:
    """Return who gave no cursor while others gave one, to end a sentence with; empty for none."""
    none = [one for one in said if one.ranks and not one.cursor]
    if not none or not agreed(one.cursor for one in said):
        return ""
    return f"; {_who(none)} gave no data cursor, which is left to the others"


def _who(who: Sequence[Said]) -> str:
    ranks = sorted({rank for one in who for rank in one.ranks})
    members = list(dict.fromkeys(one.member for one in who))
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


def agreed(given: Iterable[str]) -> str:
    """Return what all gave that gave anything; empty if that is nothing, or not the same."""
    values = set(filter(None, given))
    return values.pop() if len(values) == 1 else ""


def samples_of(said: Iterable[str]) -> str:
    """Return what ranks or pods say of the samples together; empty if they say nothing.

    One that does not keep them counts for all. One that says nothing leaves it to the others.
    """
    verdicts = sorted(filter(None, said))
    return next((one for one in verdicts if one != KEPT), verdicts[0] if verdicts else "")


def verdict(samples: str, cursor: str) -> str:
    """Return whether a commit keeps the samples, and why not: it has a verdict in any case."""
    return samples or (NO_VERDICT if cursor else NO_CURSOR)


def with_agreement(last: LastCommit, said: Sequence[Said]) -> LastCommit:
    """Return ``last`` with what all say of it, who do not differ."""
    cursor = agreed(one.cursor for one in said)
    samples = verdict(samples_of(one.samples for one in said), cursor)
    return replace(last, cursor=cursor, tag=agreed(one.tag for one in said), samples=samples)
