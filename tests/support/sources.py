# SPDX-License-Identifier: Apache-2.0
"""The files of the project, and what each of them imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("muster", "rdzv", "launcher_shim", "agent", "injection", "controller", "console")
"""Those of the product."""


def sources(*folders: str) -> list[Path]:
    """All Python files below some folders, or of the product."""
    return sorted(path for one in folders or PACKAGES for path in (ROOT / one).rglob("*.py"))


def relative(path: Path) -> str:
    """A file as it is called within the project."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    """A file as Python reads it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, and every name from one; relative ones made absolute.

    At its top, later, or for types alone.
    """
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(found)
