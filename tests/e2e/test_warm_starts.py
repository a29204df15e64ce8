# SPDX-License-Identifier: Apache-2.0
"""Workers of a zygote that has imported the real torch, beside fresh ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.training.starting import Torchrun
from tests.support.training.warm_starts import CASES, compared

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

DAILY = (
    "the same after torch is imported",
    "modules after the same imports",
    "descriptors",
    "ends by SIGSEGV, with torch",
    "a DataLoader",
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Torchrun, Torchrun]]:
    root = tmp_path_factory.mktemp("warm")
    fresh, warm = (Torchrun(root, warm=warm, real=True) for warm in (False, True))
    yield root, fresh, warm
    fresh.close()
    warm.close()


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in DAILY else pytest.mark.long) for case in CASES],
)
def test_it_is_as_a_fresh_one(both: tuple[Path, Torchrun, Torchrun], case: str) -> None:
    assert [one.differs for one in compared(*both, [case])] == [""]
