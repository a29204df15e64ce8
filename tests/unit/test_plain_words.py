# SPDX-License-Identifier: Apache-2.0
"""Words that a reader stumbles over become fewer: the ceilings only ever fall."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = re.compile(r"\b(told|anew|nobody|whoever|lets go|bears)\b", re.IGNORECASE)
PRODUCT = (
    "agent", "console", "controller", "injection", "launcher_shim", "muster", "rdzv",
)  # fmt: skip


def found(texts: Iterator[str]) -> int:
    return sum(len(WORDS.findall(text)) for text in texts)


def strings() -> Iterator[str]:
    """Every string of the product, docstrings among them."""
    for room in PRODUCT:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def names_of_tests() -> Iterator[str]:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE):
            yield name.replace("_", " ")


def test_the_pages() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert found(page.read_text(encoding="utf-8") for page in pages) <= 40


def test_help_messages_and_docstrings() -> None:
    assert found(strings()) <= 80


def test_the_names_of_tests() -> None:
    assert found(names_of_tests()) <= 307
