# SPDX-License-Identifier: Apache-2.0
"""Pages that quote the program: messages, launch lines, and texts that people search for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.launchers.life import COLUMNS
from tests.support.launchers.page import PAGE, recorded, render
from tests.support.launchers.refused import notes
from tests.support.launchers.rows import ROWS, Row
from tests.support.sources import ROOT, sources, tree

OURS = (
    "Muster's commands",
    "The sidecar's log",
    "`muster-run`, in the training container",
    "`import muster`, in the training script",
)
VARIES = re.compile(r"…|\b(?:ADDRESS|FILE|ID|JOB|KEY|MEMBER|NAME|NAMESPACE|N|PATH|PORT|RUN)\b")


def template(node: ast.AST) -> str | None:
    """The text of a literal, with NUL for whatever varies in it."""
    if isinstance(node, ast.JoinedStr):
        parts = (getattr(part, "value", None) for part in node.values)
        return "".join(part if isinstance(part, str) else "\0" for part in parts)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-+0-9.]*[a-z]", "\0", node.value)
    return None


def literals(module: ast.Module) -> Iterator[str]:
    """Every text that a program may say: docstrings are not among them."""
    silent = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    nodes = (node for node in ast.walk(module) if id(node) not in silent)
    yield from filter(None, map(template, nodes))


def templates() -> Iterator[str]:
    for path in sources():
        yield from literals(tree(path))


def quoted() -> list[str]:
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", page, re.MULTILINE))
    return [
        quote
        for name in OURS
        for heading in re.findall(r"^### (.+)$", sections[name], re.MULTILINE)
        for quote in re.findall(r"`([^`]+)`", heading)
    ]


@pytest.fixture(scope="module")
def said() -> list[str]:
    return list(templates())


@pytest.mark.parametrize("quote", quoted())
def test_the_code_says_each_sentence_that_the_page_quotes(quote: str, said: list[str]) -> None:
    fragments = VARIES.split(quote)
    assert len("".join(fragments)) > 12
    wanted = re.compile("\0".join(map(re.escape, fragments)))
    assert any(wanted.search(text) for text in said)


def test_the_page_is_what_is_on_record() -> None:
    assert PAGE.read_text() == render(), "run scripts/launchers-table"


def test_no_cell_of_a_row_that_ran_fails_or_is_left_out() -> None:
    for name, found in recorded()["rows"].items():
        assert set(found) == set(COLUMNS), name
        assert not [came for came in found.values() if came.startswith("fails")], name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_inject_takes_the_line(row: Row) -> None:
    notes(row.line)


SEARCHED = (
    "Error waiting on exit barrier",
    "node_rank is only used for static rdzv_backend",
    "master_addr is only used for static",
    "The IPv6 network addresses of (",
    "cannot be retrieved (gai error: -2",
    "Name or service not known",
    "failed to connect to any network address",
    "Connection refused",
    "Unable to resolve hostname to a (local) address",
    "Gloo connectFullMesh failed",
    "Bootstrap : no socket interface found",
    "SignalException: Process ",
    " got signal: 15",
    "recvValue failed",
    "got 0 bytes",
    "sendBytes failed",
    "Broken pipe",
    "exitcode: -9",
    "KeyError: 'RANK'",
    "NODE_RANK is not set",
    "DistNetworkError",
    "DistStoreError",
    "EADDRINUSE",
    "timed out",
)
"""Of torch, NCCL, Gloo and libraries around them; without what varies."""


def test_the_page_of_messages_has_the_texts() -> None:
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    headings = "\n".join(re.findall(r"^### .+$", page, re.MULTILINE))
    missing = [text for text in SEARCHED if text not in headings]
    assert missing == []
