# SPDX-License-Identifier: Apache-2.0
"""Real trainers live through changes of their world: no step lost or doubled, each row once."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.training.survivor import BATCH, ROWS
from tests.support.training.worlds import Worlds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

DIES_AT = 12


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_i12_i13_a_trainer_lives_through_a_loss_a_join_and_a_drain(
    tmp_path: Path, trainer: str
) -> None:
    life = import_module(f"tests.support.training.{trainer}_survivor").train
    with Worlds(tmp_path, life=life) as worlds:
        worlds.start("a", "b")
        worlds.start("c", dies_at=DIES_AT)
        worlds.ready(*"abc")
        assert worlds.form(*"abc"), worlds.shown()
        worlds.until(lambda: worlds.is_dead("c"), "c dies amid a backward pass")
        worlds.lose("c")
        worlds.start("d")
        worlds.join("d")
        worlds.at(worlds.told("a")["step"] + 3)
        worlds.leave("a")
        worlds.at(worlds.told("b")["step"] + 3)
        last = worlds.end()
        worlds.check(last)
        assert {*worlds.digests()} == {1, 2, 3, 4}
        by_step, steps = worlds.rows(), ROWS // BATCH
        assert [len(by_step[step]) for step in range(1, last + 1)] == [BATCH] * last
        for epoch in range(last // steps):
            rows = Counter(row for at in range(steps) for row in by_step[epoch * steps + at + 1])
            assert rows == Counter(range(ROWS))
