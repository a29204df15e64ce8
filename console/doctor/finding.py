# SPDX-License-Identifier: Apache-2.0
"""The result of one check of the doctor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.verdict.states import Level

WORST_FIRST: Sequence[Level] = ("fault", "warning", "note", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding with, unless it is in order, its remedy."""

    check: str
    level: Level
    sentence: str
    remedy: str = ""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level; those of one level stay in order."""
    return sorted(findings, key=lambda finding: WORST_FIRST.index(finding.level))
