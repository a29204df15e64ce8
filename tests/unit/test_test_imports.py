# SPDX-License-Identifier: Apache-2.0
"""Tests import the product and ``tests.support`` alone; each invariant has a test that names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.sources import ROOT, imports, relative, sources

BESIDE = {"simulation": ("simulation",), "world": ("simulation", "world")}
"""The simulation is a program of its own, with its tests beside it; scenarios run in it."""


@pytest.mark.parametrize("path", sources("tests"), ids=relative)
def test_only_what_tests_share_is_imported(path: Path) -> None:
    allowed = ("support", *BESIDE.get(path.relative_to(ROOT).parts[1], ()))
    names = [name.split(".") for name in imports(path) if name.startswith("tests.")]
    assert [one for one in names if one[1] not in allowed or "test_" in ".".join(one[:3])] == []


@pytest.mark.parametrize("number", range(1, 14))
def test_each_invariant_has_a_test_that_names_it(number: int) -> None:
    named = re.compile(rf"^(async )?def test_i{number}_", re.MULTILINE)
    assert any(named.search(path.read_text(encoding="utf-8")) for path in sources("tests"))
