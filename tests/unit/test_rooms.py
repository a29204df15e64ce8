# SPDX-License-Identifier: Apache-2.0
"""Imports inside a folder point one way, and files and functions are of a size to read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.sources import ROOT, relative, sources, tree


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


LINES_MAX = 400
LONGER = {"rdzv/drain/decision.py"}
"""The whole protocol of drains, to be read in one piece."""

FUNCTION_LINES_MAX = 70

FILES_MAX = 345
ONE_IMPORTER_MAX = 59
"""Parts of their importers; the assembly of a process has the most of them."""
OF_A_LAUNCHER = "launcher_shim.horovod."
"""The folder of a launcher, which nothing but the launchers' rows imports."""


def test_no_file_is_too_long_to_read_at_once() -> None:
    lines = {relative(one): one.read_text().count("\n") for one in MODULES.values()}
    assert {name for name, count in lines.items() if count > LINES_MAX} == LONGER


def test_no_function_is_too_long_to_read_at_once() -> None:
    long = [
        f"{relative(path)}: {node.name}"
        for path in MODULES.values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert long == []


def test_the_files_do_not_become_more_and_smaller() -> None:
    assert len(MODULES) <= FILES_MAX
    importers: dict[str, set[str]] = {}
    for name, targets in arrows().items():
        for target in targets:
            importers.setdefault(target, set()).add(name)
    alone = {name for name, of in importers.items() if len(of) == 1} - {*ROOMS}
    alone = {name for name in alone if not name.startswith(OF_A_LAUNCHER)}
    assert len(alone) <= ONE_IMPORTER_MAX
