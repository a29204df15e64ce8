# SPDX-License-Identifier: Apache-2.0
"""Tests import the product and ``tests.support`` alone; each invariant has a test that names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.sources import ROOT, imports, relative, sources

BESIDE = {"simulation": ("simulation",), "world": ("simulation", "world")}
"""The simulation is a program of its own, with its tests beside it; scenarios run in it."""


def refused(path: Path, name: str) -> bool:
    """Whether a file below ``tests`` may not import this."""
    parts = name.split(".")
    if any(part.startswith("test_") for part in parts[:3]):
        return True
    return parts[1] not in ("support", *BESIDE.get(path.parts[1], ()))


@pytest.mark.parametrize("path", sources("tests"), ids=relative)
def test_only_what_tests_share_is_imported(path: Path) -> None:
    names = [name for name in imports(path) if name.startswith("tests.")]
    assert [name for name in names if refused(path.relative_to(ROOT), name)] == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tests/unit/test_hosts.py", "tests.contract.test_kv.Client"),
        ("tests/unit/test_hosts.py", "tests.contract.conftest.store"),
        ("tests/support/ports.py", "tests.simulation.story.Story"),
    ],
)
def test_what_is_refused(path: str, name: str) -> None:
    assert refused(Path(path), name)


@pytest.mark.parametrize("number", range(1, 14))
def test_each_invariant_has_a_test_that_names_it(number: int) -> None:
    named = re.compile(rf"^(async )?def test_i{number}_", re.MULTILINE)
    assert any(named.search(path.read_text(encoding="utf-8")) for path in sources("tests"))
