# SPDX-License-Identifier: Apache-2.0
"""A class's name means one thing in the product; docstrings begin with a subject or a verb."""

from __future__ import annotations

import ast
import re

from tests.support.sources import PACKAGES, relative, sources, tree

GENERATED = "rdzv/store/etcd_pb2.py"

SAME_WORD = {
    "Drain": "what a user's script holds, and its record in the store: both are the drain of a pod",
    "MusterCallback": "users import it from the module of their trainer, as each trainer has it",
    "World": "what a user's script trains in, and what a report says of it: both are the ranks",
}
"""Names that two classes have, and why."""

HEADLESS = re.compile(r"(?:What|Who|Whoever|Whatever|When|Where|How|Which|Why)\b")


def test_two_classes_share_a_name_where_it_means_the_same() -> None:
    files: dict[str, list[str]] = {}
    for path in sources():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not relative(path).startswith(GENERATED):
                files.setdefault(node.name, []).append(relative(path))
    shared = {name: found for name, found in files.items() if len(found) > 1}
    assert shared.keys() == SAME_WORD.keys(), shared


def test_no_docstring_begins_with_a_relative_clause() -> None:
    """Of modules, classes, functions and attributes; ruff wants the imperative of functions."""
    assert HEADLESS.match("What it is.")
    files = sources(*PACKAGES, "benchmarks", "scripts")
    assert files
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{relative(path)}:{one.lineno}: {text.splitlines()[0]}"
        for path in files
        for node in ast.walk(tree(path))
        if isinstance(node, owners)
        for one in node.body
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        if isinstance(text := one.value.value, str) and HEADLESS.match(text)
    ]
    assert found == []
