# SPDX-License-Identifier: Apache-2.0
"""A rank's activity while its world stands still, as its sidecar has found out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, cast, get_args

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import take

Doing = Literal[
    "collective",
    "loader",
    "script",
    "stopped",
    "ended",
    "saves",
    "evaluates",
    "compiles",
    "muster",
    "unknown",
]
"""A rank's activity: it waits in a collective operation for the others, is in its data loader, is
elsewhere in its script, its process is stopped (SIGSTOP) or has ended, it saves, evaluates or
compiles, or waits for Muster. ``unknown``: it gives no stack."""

BUSY: tuple[Doing, ...] = ("saves", "evaluates", "compiles", "muster")
"""Activities that may take minutes while the others wait."""

TEXT_MAX = 100
RANKS_MAX = 64
"""Bound on the ranks of one pod."""


@dataclass(frozen=True, slots=True)
class StillRank:
    """One rank. ``call``: the operation that it waits in, empty if it is in none that is known.

    ``where``: the innermost line of its script, as in ``train.py:31``; empty if unknown. ``via``:
    the lines that led there, the innermost first, as in ``train.py:80, train.py:95``.
    """

    rank: int
    doing: Doing
    call: str = ""
    where: str = ""
    via: str = ""

    @property
    def sentence(self) -> str:
        """Its activity in words that follow "rank 2": ``is stopped``."""
        at = f" ({self.where})" if self.where else ""
        return {
            "collective": f"waits in {self.call}{at}",
            "loader": f"is in its data loader{at}",
            "script": f"is outside of any collective operation{at}",
            "stopped": "is stopped, as by SIGSTOP or a debugger",
            "ended": "has ended",
            "saves": f"saves{at}",
            "evaluates": f"evaluates{at}",
            "compiles": f"compiles{at}",
            "muster": f"waits for Muster{at}",
            "unknown": "gives no stack",
        }[self.doing]

    def as_json(self) -> dict[str, object]:
        """Return it as part of a record."""
        via = {"via": self.via} if self.via else {}
        return {
            "rank": self.rank,
            "doing": self.doing,
            "call": self.call,
            "where": self.where,
            **via,
        }

    @classmethod
    def from_fields(cls, key: str, fields: object) -> Self:
        """Read it; raise ``RecordError`` if it is malformed."""
        if not isinstance(fields, Mapping):
            raise RecordError(f"{key}: a rank is {fields!r}, expected an object")
        doing = take(key, fields, "doing", str)
        return cls(
            take(key, fields, "rank", int),
            cast(Doing, doing) if doing in get_args(Doing) else "unknown",
            _text(key, fields, "call"),
            _text(key, fields, "where"),
            _text(key, fields, "via"),
        )


def take_still(key: str, fields: Mapping[str, Any]) -> tuple[StillRank, ...]:
    """Read the ranks of a pod that stand still; raise ``RecordError`` if they are malformed."""
    found = take(key, fields, "still", list, [])
    return tuple(StillRank.from_fields(key, one) for one in found[:RANKS_MAX])


def _text(key: str, fields: Mapping[str, Any], name: str) -> str:
    text = str(take(key, fields, name, str, ""))[:TEXT_MAX]
    return "".join(c if c.isprintable() else "?" for c in text)
