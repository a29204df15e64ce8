# SPDX-License-Identifier: Apache-2.0
"""The names of log events are an interface: the operator's page has each of them, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.sources import ROOT, sources, tree

FORMATTER = ROOT / "agent" / "telemetry" / "logs.py"
"""It passes on what others have named."""

LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "critical",
}
"""Methods of a logger, and the level that each logs at."""


def named(extra: ast.expr) -> str | None:
    """The event that a dict names; None where it names none."""
    if not isinstance(extra, ast.Dict):
        return None
    for key, value in zip(extra.keys, extra.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == "event":
            assert isinstance(value, ast.Constant), f"line {value.lineno}: an event without a name"
            assert isinstance(value.value, str)
            return value.value
    return None


def events_in(path: Path) -> Iterator[tuple[str, str | None]]:
    """Each event that code names, with its level where the call says that."""
    nodes = list(ast.walk(tree(path)))
    for node in nodes:
        if isinstance(node, ast.Dict) and (name := named(node)):
            yield name, None
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            for keyword in node.keywords:
                if keyword.arg == "extra" and (name := named(keyword.value)):
                    yield name, LEVELS.get(node.func.attr)


@cache
def events_of_the_code() -> dict[str, set[str]]:
    """The levels that are known of each event."""
    events: dict[str, set[str]] = defaultdict(set)
    for path in sources():
        if path != FORMATTER:
            for name, level in events_in(path):
                events[name] |= {level} if level else set()
    return events


def events_of_the_page() -> list[tuple[str, set[str]]]:
    """The rows of the table, in its order: event and levels."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("\n## Log events\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", section, re.MULTILINE)
    return [(name, set(levels.split(", "))) for name, levels in rows]


def test_the_page_has_every_event_that_the_code_names_and_no_other() -> None:
    page = {name for name, _ in events_of_the_page()}
    code = {*events_of_the_code()}
    assert page - code == set(), "docs/operations.md has log events that no code names"
    assert code - page == set(), "add these log events to the table in docs/operations.md"


def test_the_table_has_the_levels_that_the_code_logs_at() -> None:
    code = events_of_the_code()
    assert code["listener_failed"] == {"error"}  # logged with its traceback
    missing = {name: code[name] - levels for name, levels in events_of_the_page()}
    assert {name: levels for name, levels in missing.items() if levels} == {}
