# SPDX-License-Identifier: Apache-2.0
"""No regular expression takes more than linear time, whatever text it is given.

Each that is written out in the product meets texts that repeat what it is made of, shorter and
longer ones: its work may grow as the text does, and not with its square.
"""

from __future__ import annotations

import ast
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "console", "controller", "injection", "launcher_shim", "muster", "rdzv")
WHOLE = frozenset({"match", "fullmatch"})
"""These look at the beginning of a text alone; all others search it."""
BRIEF_S = 0.01
"""What takes less is too short to be measured."""
FEW, MANY = 200, 20_000
"""A pattern is slow at once if it takes ``BRIEF_S`` with the few, and fast if not with the many."""
TIMES = 9.0
"""A text that is four times as long may take so many times as long; a square takes 16 times."""


def patterns() -> Iterator[tuple[str, str, bool]]:
    """Each pattern that is written out: where, and whether texts are searched for it."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="re"), attr=how),
                        args=[ast.Constant(value=str(pattern)), *_],
                    ):
                        used = {how}
                        if how == "compile":
                            lines = ast.get_source_segment(text, node) or ""
                            name = re.search(rf"(\w+) = {re.escape(lines)}", text)
                            used = (
                                set(re.findall(rf"\b{name[1]}\.(\w+)\(", text)) if name else set()
                            )
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", pattern, not used <= WHOLE


def _pieces(pattern: str) -> list[str]:
    """Short texts of what a pattern is made of: its literal words, and one character of a class."""
    words = re.findall(r"[A-Za-z]{2,}|[^\w\s]|\d", pattern.replace("\\", ""))
    common = [" ", "\n", "a", "0", "-", "{", "/", "A0", "a-"]
    return sorted({*words[:12], *common})


def is_superlinear(pattern: str, *, searches: bool = True) -> str:
    """Return the repeated text that makes a pattern slow; empty if none is known."""
    compiled, pieces = re.compile(pattern), _pieces(pattern)
    for start, one in itertools.product(("", *pieces), pieces):

        def spent_s(length: int, start: str = start, one: str = one) -> float:
            text = start + one * (length // len(one)) + "\0"
            begun_s = time.process_time()
            if searches:
                compiled.sub("", text)
            compiled.fullmatch(text)
            return time.process_time() - begun_s

        length = 8
        while spent_s(length) < BRIEF_S and length < MANY:
            length += length // 2
        if length < FEW:
            return f"{start!r} and {one!r} repeated"
        if length < MANY:
            short_s, long_s = (min(spent_s(n) for _ in range(3)) for n in (length, 4 * length))
            if long_s > TIMES * short_s:
                return f"{start!r} and {one!r} repeated"
    return ""


@pytest.mark.parametrize(("where", "pattern", "searches"), sorted(patterns()))
def test_no_pattern_takes_more_than_linear_time(where: str, pattern: str, searches: bool) -> None:
    assert not is_superlinear(pattern, searches=searches), where


@pytest.mark.parametrize("slow", [r"/(?![^{]*})", r"(a+)+b", r"\s*,\s*\Z"])
def test_a_slow_pattern_would_be_found(slow: str) -> None:
    assert is_superlinear(slow)
