# SPDX-License-Identifier: Apache-2.0
"""Counts with their nouns, and durations with their units."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """Spell a duration in its two largest units: ``41 s``, ``4 min 12 s``, ``2 h 14 min``."""
    whole = int(seconds)
    minutes, hours = whole // 60, whole // 3600
    if whole < 60:
        return f"{whole} s"
    if hours == 0:
        return f"{minutes} min {whole % 60} s"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"
