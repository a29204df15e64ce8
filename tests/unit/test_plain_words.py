# SPDX-License-Identifier: Apache-2.0
"""Words that a reader stumbles over become fewer: the ceilings only ever fall."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from tests.support.sources import ROOT, sources, tree

WORDS = re.compile(r"\b(told|anew|nobody|whoever|lets go|bears)\b", re.IGNORECASE)


def found(texts: Iterable[str]) -> int:
    return sum(len(WORDS.findall(text)) for text in texts)


def test_the_pages() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert found(page.read_text(encoding="utf-8") for page in pages) <= 40


def test_help_messages_and_docstrings() -> None:
    constants = (node for path in sources() for node in ast.walk(tree(path)))
    values = (node.value for node in constants if isinstance(node, ast.Constant))
    assert found(value for value in values if isinstance(value, str)) <= 80


def test_the_names_of_tests() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"^ *(?:async )?def (test_\w+)", tests, re.MULTILINE)
    assert found(name.replace("_", " ") for name in names) <= 307
