# SPDX-License-Identifier: Apache-2.0
"""Loops are written once: the numbers of hand-written ones, waits and mirror waits do not grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("rdzv", "agent", "launcher_shim", "controller")

LOOPS_MAX = 25
"""Classes with an endless loop of their own; most move bytes, or run in users' containers."""
FIRST_COMPLETED_MAX = 2
"""Hand-written waits for the first of several things; others go through ``rdzv.reconcile``."""
REACHED_MAX = 2
"""Waits for a revision without a limit, outside of the client (``rdzv/job.py``)."""


def files() -> Iterator[tuple[str, str]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def endless(node: ast.AST) -> bool:
    return isinstance(node, ast.While) and isinstance(node.test, ast.Constant)


def test_classes_with_a_loop_of_their_own_do_not_grow_in_number() -> None:
    found = [
        f"{name}: {one.name}"
        for name, text in files()
        for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.ClassDef) and any(map(endless, ast.walk(one)))
    ]
    assert len(found) <= LOOPS_MAX, found


def test_waits_are_not_written_by_hand() -> None:
    waits = [
        name for name, text in files() if "FIRST_COMPLETED" in text and "reconcile.py" not in name
    ]
    assert len(waits) <= FIRST_COMPLETED_MAX, waits
    reached = [
        name
        for name, text in files()
        for _ in range(text.count("mirror.reached("))
        if name != "rdzv/job.py"
    ]
    assert len(reached) <= REACHED_MAX, reached
