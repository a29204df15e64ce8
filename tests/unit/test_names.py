# SPDX-License-Identifier: Apache-2.0
"""The name of a class means one thing in the whole product."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("muster", "rdzv", "launcher_shim", "agent", "injection", "controller", "console")
GENERATED = "rdzv/store/etcd_pb2.py"

SAME_WORD = {
    "Drain": "what a user's script holds, and its record in the store: both are the drain of a pod",
    "MusterCallback": "users import it from the module of their trainer, as each trainer has it",
    "World": "what a user's script trains in, and what a report says of it: both are the ranks",
}
"""Names that two classes have, and why."""


def classes() -> dict[str, list[str]]:
    """The files that have a public class at their top, by its name."""
    files: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not relative.startswith(GENERATED):
                    files.setdefault(node.name, []).append(relative)
    return files


def test_no_two_classes_share_a_name() -> None:
    shared = {name: files for name, files in classes().items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in SAME_WORD} == {}


def test_a_name_that_is_allowed_to_two_classes_has_two() -> None:
    assert {name for name, files in classes().items() if len(files) > 1} == {*SAME_WORD}
