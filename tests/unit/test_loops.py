# SPDX-License-Identifier: Apache-2.0
"""Rules of the source that no linter has: loops, regular expressions, texts of errors."""

from __future__ import annotations

import ast
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import relative, sources, tree

ROOMS = ("rdzv", "agent", "launcher_shim", "controller")

LOOPS_MAX = 25
"""Classes with an endless loop of their own; most move bytes, or run in users' containers."""
FIRST_COMPLETED_MAX = 2
"""Hand-written waits for the first of several things; others go through ``rdzv.reconcile``."""
REACHED_MAX = 2
"""Waits for a revision without a limit, outside of the client (``rdzv/job.py``)."""


def files() -> Iterator[tuple[str, str]]:
    for path in sources(*ROOMS):
        yield relative(path), path.read_text()


def endless(node: ast.AST) -> bool:
    return isinstance(node, ast.While) and isinstance(node.test, ast.Constant)


def test_classes_with_a_loop_of_their_own_do_not_grow_in_number() -> None:
    found = [
        f"{name}: {one.name}"
        for name, text in files()
        for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.ClassDef) and any(map(endless, ast.walk(one)))
    ]
    assert len(found) <= LOOPS_MAX, found


def test_waits_are_not_written_by_hand() -> None:
    waits = [
        name for name, text in files() if "FIRST_COMPLETED" in text and "reconcile.py" not in name
    ]
    assert len(waits) <= FIRST_COMPLETED_MAX, waits
    reached = [
        name
        for name, text in files()
        for _ in range(text.count("mirror.reached("))
        if name != "rdzv/job.py"
    ]
    assert len(reached) <= REACHED_MAX, reached


WHOLE = frozenset({"match", "fullmatch"})
"""These look at the beginning of a text alone; all others search it."""
BRIEF_S = 0.01
"""What takes less is too short to be measured."""
LENGTHS = (8, 12, 18, 27, 40, 60, 90, 135, 202, 800, 3_200, 12_800, 20_000)
"""The lengths that are tried, until one takes ``BRIEF_S``: a pattern is fast if none does."""
FEW = 200
"""A pattern that takes ``BRIEF_S`` with a shorter text is slow at once."""
TIMES = 9.0
"""A text that is four times as long may take so many times as long; a square takes 16 times."""


def patterns() -> Iterator[tuple[str, str, bool]]:
    """Each pattern that is written out: where, and whether texts are searched for it."""
    for path in sources():
        text = path.read_text()
        for node in ast.walk(tree(path)) if re.search(r"\bre\.\w+\(", text) else ():
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="re"), attr=how),
                    args=[ast.Constant(value=str(pattern)), *_],
                ):
                    used = {how}
                    if how == "compile":
                        lines = ast.get_source_segment(text, node) or ""
                        name = re.search(rf"(\w+) = {re.escape(lines)}", text)
                        used = set(re.findall(rf"\b{name[1]}\.(\w+)\(", text)) if name else set()
                    yield f"{relative(path)}:{node.lineno}", pattern, not used <= WHOLE


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

        length = next((n for n in LENGTHS if spent_s(n) >= BRIEF_S), None)
        if length is None:
            continue
        if length < FEW:
            return f"{start!r} and {one!r} repeated"
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
