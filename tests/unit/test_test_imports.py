# SPDX-License-Identifier: Apache-2.0
"""Tests import the product and ``tests.support``; no test module is a library of another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The modules and names below ``tests`` that a file imports."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def refused(path: Path, name: str) -> bool:
    """Whether a file below ``tests`` may not import this."""
    parts = name.split(".")
    if any(part.startswith("test_") for part in parts[:3]):
        return True
    # The simulation is a program of its own, with its tests beside it.
    return parts[1] not in ({"support", "simulation"} & {"support", path.parts[1]})


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_only_what_tests_share_is_imported(path: Path) -> None:
    assert [name for name in imported(path) if refused(path, name)] == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tests/unit/test_hosts.py", "tests.contract.test_kv.Client"),
        ("tests/unit/test_hosts.py", "tests.contract.conftest.store"),
        ("tests/support/ports.py", "tests.simulation.story.Story"),
    ],
)
def test_what_is_refused(path: str, name: str) -> None:
    assert refused(Path(path), name)
