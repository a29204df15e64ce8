# SPDX-License-Identifier: Apache-2.0
"""No sentence ends with the text of an exception that has none: a time-out's is empty."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import relative, sources, tree


def catches_timeouts(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is not None and "TimeoutError" in ast.dump(kind) for kind in kinds)


def bare_texts(handler: ast.ExceptHandler) -> Iterator[ast.AST]:
    """Where the handler's exception is spelled, and nothing stands in for an empty text."""
    for node in ast.walk(handler):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.Name) and child.id == handler.name
            if named and isinstance(node, ast.FormattedValue):
                yield node
            if named and isinstance(node, ast.Call) and "log" in ast.dump(node.func):
                yield node


def guarded(handler: ast.ExceptHandler) -> bool:
    """Whether it asks first whether there is a text: ``if str(error)``, ``str(error) or``."""
    asked = (node for node in ast.walk(handler) if isinstance(node, ast.BoolOp | ast.IfExp))
    return any(f"id='{handler.name}'" in ast.dump(node) for node in asked)


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_a_time_out_is_told_in_words(path: Path) -> None:
    handlers = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ExceptHandler)]
    silent = [
        one.lineno
        for one in handlers
        if one.name and catches_timeouts(one) and not guarded(one) and [*bare_texts(one)]
    ]
    assert silent == []
