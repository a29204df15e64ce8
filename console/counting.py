# SPDX-License-Identifier: Apache-2.0
"""How a number of things is spelled."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Spell a number with its noun: ``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
