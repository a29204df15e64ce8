# SPDX-License-Identifier: Apache-2.0
"""Lines of a job of ``muster local``: whole lines of its files, from where reading ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from console.logs.command import LINE_MAX, LocalLogs, LogFile
from console.logs.lines import Source
from console.logs.printing import Pages
from console.whereabouts import RunningJob
from rdzv.records.history import HistoryEntry


@pytest.fixture
def file(tmp_path: Path) -> LogFile:
    return LogFile(tmp_path / "torchrun.log", Source("node-0"))


def add(file: LogFile, content: bytes) -> list[str]:
    with file.path.open("ab") as log:
        log.write(content)
    return list(file.lines())


def test_a_line_comes_once_it_is_whole(file: LogFile) -> None:
    assert add(file, b"one\ntw") == ["one"]
    assert add(file, b"") == []
    assert add(file, "o \u2192".encode()[:-1]) == []
    assert add(file, "\u2192".encode()[-1:] + b"\n") == ["two \u2192"]


def test_a_line_that_never_ends_comes_in_pieces(file: LogFile) -> None:
    pieces = add(file, b"x" * (3 * LINE_MAX))
    rest = add(file, b"\nnext\n")
    assert sum(map(len, [*pieces, *rest[:-1]])) == 3 * LINE_MAX
    assert max(map(len, pieces)) < 2 * LINE_MAX
    assert rest[-1] == "next"


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ({}, ["[node-0] a", "[node-0] b", "[node-1] c"]),
        ({"tail": 1}, ["[node-0] b", "[node-1] c"]),
        ({"tail": 0}, []),
        ({"with_sidecar": True, "tail": 1}, ["[node-0 sidecar] s", "[node-0] b", "[node-1] c"]),
    ],
    ids=str,
)
def test_past_lines_are_node_by_node(
    tmp_path: Path, more: dict[str, Any], lines: list[str]
) -> None:
    written = {"node-0/torchrun.log": "a\nb\n", "node-1/torchrun.log": "c\n"}
    written["node-0/sidecar.log"] = "s\n"
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    printed: list[str] = []
    job = RunningJob("127.0.0.1:1", "local", "local", 1, str(tmp_path))
    logs = LocalLogs(job, Pages(), lambda one: printed.append(str(one)), **more)
    logs.show_past()
    assert printed == lines


def test_a_new_world_is_announced_though_it_says_nothing(tmp_path: Path) -> None:
    printed: list[str] = []
    job = RunningJob("127.0.0.1:1", "local", "local", 1, str(tmp_path))
    logs = LocalLogs(job, Pages(), lambda one: printed.append(str(one)))
    details = {"round": 2, "nodes": 1, "members": ["node-0"]}
    logs.pages.take_in([HistoryEntry("round", "node-0", "", 1.0, details, 7)])
    asyncio.run(logs.look())
    assert printed == ["── world of 1 node: node-0 (round 2) ──"]
