# SPDX-License-Identifier: Apache-2.0
"""Docstrings begin with a subject or a verb; ruff checks that a function's is in the imperative."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = (
    *("muster", "rdzv", "launcher_shim", "agent", "injection", "controller", "console"),
    *("benchmarks", "scripts"),
)
HEADLESS = re.compile(r"(?:What|Who|Whoever|Whatever|When|Where|How|Which|Why)\b")


def files() -> list[Path]:
    return sorted(path for place in PLACES for path in (ROOT / place).rglob("*.py"))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text


def test_no_docstring_begins_with_a_relative_clause() -> None:
    assert files()
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files()
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if HEADLESS.match(text)
    ]
    assert found == []


def test_a_relative_clause_is_found() -> None:
    source = 'class A:\n    """An a."""\n    b: int\n    """What it is."""\n'
    assert [text for _, text in docstrings(ast.parse(source)) if HEADLESS.match(text)] == [
        "What it is."
    ]
