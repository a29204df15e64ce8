# SPDX-License-Identifier: Apache-2.0
"""Inside every folder of the product imports point one way: no circle of its files and folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.sources import ROOT, sources, tree


def module(path: Path) -> str:
    """The dotted name of a file; a package by its ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in sources()}
ROOMS = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


def imported(path: Path) -> Iterator[str]:
    """The modules of the product that a file imports, at its top, later, or for types alone."""
    for node in ast.walk(tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inside]
        yield from (name for name in names if name in MODULES)


@cache
def arrows() -> dict[str, set[str]]:
    """What each module imports of the others."""
    return {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def arrows_in(room: str) -> dict[str, set[str]]:
    """What each file or folder of a room imports of the others in it."""

    def place(module: str) -> str:
        inside = module.startswith(room + ".")
        return module.removeprefix(room + ".").partition(".")[0] if inside else ""

    graph: dict[str, set[str]] = {}
    for module, targets in arrows().items():
        if here := place(module):
            others = {place(target) for target in targets} - {here, ""}
            graph.setdefault(here, set()).update(others)
    return graph


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_has_a_circle(room: str) -> None:
    TopologicalSorter(arrows_in(room)).prepare()


def test_no_files_import_each_other() -> None:
    TopologicalSorter(arrows()).prepare()


def test_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
