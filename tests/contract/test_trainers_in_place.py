# SPDX-License-Identifier: Apache-2.0
"""Real trainers live through changes of their world: no step lost or doubled, each row once."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.survivor import BATCH, ROWS
from tests.support.training.worlds import Worlds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

DIES_AT = 12


@pytest.mark.parametrize("dies", ["dies_after", pytest.param("dies_at", marks=pytest.mark.long)])
@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_i12_i13_a_trainer_lives_through_a_loss_a_join_and_a_drain(
    tmp_path: Path, trainer: str, dies: str
) -> None:
    life = import_module(f"tests.support.training.{trainer}_survivor").train
    with Worlds(tmp_path, life=life) as worlds:
        worlds.start("a", "b")
        worlds.start("c", **{dies: DIES_AT})
        worlds.ready(*"abc")
        assert worlds.form(*"abc"), worlds.shown()
        worlds.until(lambda: worlds.is_dead("c"), "c dies amid a step")
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


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_a_trainer_falls_back_before_its_first_world(tmp_path: Path, trainer: str) -> None:
    life = import_module(f"tests.support.training.{trainer}_survivor").train
    (tmp_path / "goal").write_text("6")
    with Worlds(tmp_path, life=life) as worlds:
        worlds.start("a")
        worlds.ready("a")
        worlds.order("a", phase="fall-back", why="another rank has no World")
        worlds.until(lambda: worlds.is_dead("a"), "it trains to its end")
        assert worlds.processes["a"].exitcode == 0, worlds.shown()
        assert [line["step"] for line in worlds.log("a") if "step" in line] == [*range(1, 7)]
        assert "does not change in place from step 0 on: another rank" in worlds.shown()


def test_without_a_sidecar_a_trainer_trains_as_without_in_place(tmp_path: Path) -> None:
    import muster.transformers
    from tests.support.training.transformers_life import ROWS as OWN_ROWS
    from tests.support.training.transformers_life import trainer_of

    given: dict[str, Any] = {"num_train_epochs": 1}
    plain, in_place = (trainer_of(tmp_path / name, 10**9, **given) for name in "ab")
    muster.transformers.train(plain, global_batch=10)
    muster.transformers.train(in_place, global_batch=10, in_place=True)
    assert in_place.model.seen == plain.model.seen
    assert Counter(in_place.model.seen) == Counter(range(len(OWN_ROWS)))


def test_a_rank_that_stands_alone_trains_in_no_world_but_one_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import muster.transformers
    from tests.support.training.transformers_life import trainer_of

    monkeypatch.setattr(muster.transformers, "_alone", True)
    trainer = trainer_of(tmp_path, 10**9, num_train_epochs=1)
    with pytest.raises(ValueError, match="was started beside a world that trains"):
        muster.transformers.train(trainer, global_batch=10)
    assert not trainer.model.seen


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"strategy": "auto"}, "it needs strategy='ddp'"),
        ({"callbacks": ["StochasticWeightAveraging"]}, "StochasticWeightAveraging"),
        ({"callbacks": ["LearningRateFinder"]}, "LearningRateFinder"),
    ],
)
def test_a_trainer_of_lightning_that_cannot_live_on_is_refused(
    tmp_path: Path, given: dict[str, Any], named: str
) -> None:
    import lightning.pytorch.callbacks as kinds

    import muster.lightning
    from tests.support.training.lightning_cases import DATA, Net

    made = {"StochasticWeightAveraging": {"swa_lrs": 0.1}}
    callbacks = [getattr(kinds, one)(**made.get(one, {})) for one in given.pop("callbacks", [])]
    with pytest.raises(ValueError, match=named):
        muster.lightning.fit(
            Net(), DATA, directory=str(tmp_path), global_batch=16, in_place=True,
            accelerator="cpu", logger=False, callbacks=callbacks, **given,
        )  # fmt: skip
