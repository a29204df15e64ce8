# SPDX-License-Identifier: Apache-2.0
"""What each test calls, how long it takes, and if it passes: without a bug, once for each state of
the tree."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import pytest

from tests.support.kill_matrix.children import Ran, Tell, hear_of_processes, run, traced
from tests.support.kill_matrix.matrix import layer
from tests.support.kill_matrix.places import PRODUCT, ROOT
from tests.support.sources import imports

LIMIT_S = 20.0
"""A test that takes longer takes no part."""
PIECE = 40
"""Tests in one process, one after another."""


def tree_digest() -> str:
    """What the product and its tests are, as one number."""
    digest = hashlib.sha256()
    for folder in (*PRODUCT, "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent != Path(__file__).parent:
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def _file() -> Path:
    cache = Path(os.environ.get("MUSTER_CACHE", Path.home() / ".cache" / "muster"))
    (cache / "kill-matrix").mkdir(parents=True, exist_ok=True)
    return cache / "kill-matrix" / f"{tree_digest()[:16]}.jsonl"


def _record(items: Sequence[pytest.Item], tell: Tell) -> None:
    for item in items:
        tell(asdict(traced(item, LIMIT_S)))


def is_virtual(item: pytest.Item) -> bool:
    return item.get_closest_marker("virtual") is not None


def closure(path: Path, known: dict[Path, frozenset[Path]]) -> frozenset[Path]:
    """All files of the project that a file imports, directly or not."""
    if path not in known:
        seen, ahead = {path}, [path]
        while ahead:
            for name in imports(ahead.pop()):
                file = _file_of(name)
                if file is not None and file not in seen:
                    seen.add(file)
                    ahead.append(file)
        known[path] = frozenset(seen)
    return known[path]


@cache
def _file_of(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def recorded(
    session: pytest.Session, items: Sequence[pytest.Item], at_once: int, *, adds: bool = True
) -> dict[str, Ran]:
    """The recording of these tests; those that lack one are run, unless it ``adds`` nothing."""
    path = _file()
    known: dict[str, Ran] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            ran = Ran.of(json.loads(line))
            known[ran.test] = ran
    lacking = [item for item in items if item.nodeid not in known]
    if not lacking or not adds:
        return known
    # What runs in virtual time waits for nothing, and is known first.
    lacking.sort(key=lambda item: layer(item.nodeid) == "contract" and not is_virtual(item))
    hear_of_processes()
    with path.open("a", encoding="utf-8") as file:
        while lacking:
            pieces = [lacking[at : at + PIECE] for at in range(0, len(lacking), PIECE)]
            jobs = [(str(number), partial(_record, piece)) for number, piece in enumerate(pieces)]
            told = set()
            for _, found in run(session, jobs, at_once, PIECE * LIMIT_S):
                if found is not None:
                    ran = Ran.of(found)
                    known[ran.test] = ran
                    told.add(ran.test)
                    file.write(json.dumps(found) + "\n")
                    file.flush()
            # The first that a piece has not told of has ended its process.
            for piece in pieces:
                missing = [item for item in piece if item.nodeid not in told]
                if missing:
                    known[missing[0].nodeid] = Ran(missing[0].nodeid, True, False, LIMIT_S)
            lacking = [item for item in lacking if item.nodeid not in known]
    return known
