# SPDX-License-Identifier: Apache-2.0
"""Workers of a zygote that has imported the real torch, beside fresh ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.training.starting import Torchrun
from tests.support.training.warm_starts import CASES, IMPORTS, compared, in_turns

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600)]

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


@pytest.mark.parametrize("case", DAILY)
def test_it_is_as_a_fresh_one(both: tuple[Path, Torchrun, Torchrun], case: str) -> None:
    assert [one.differs for one in compared(*both, [case])] == [""]


@pytest.mark.long
def test_two_hundred_starts_fresh_and_warm_are_the_same(
    both: tuple[Path, Torchrun, Torchrun],
) -> None:
    pairs = list(compared(*both, in_turns(200)))
    assert [one for one in pairs if one.differs] == []
    assert len(pairs) == 100
    assert {one.case for one in pairs} == set(CASES)


def test_each_draws_its_own_numbers(both: tuple[Path, Torchrun, Torchrun], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import random\n{IMPORTS}print(torch.initial_seed(), torch.rand(1).item())\n"
        "print(numpy.random.rand(), random.random())"
    )
    drawn = [both[2].start(str(script)).out.split() for _ in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 8
