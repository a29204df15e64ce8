# SPDX-License-Identifier: Apache-2.0
"""The data of a real Trainer of transformers: where it goes on, and what counts as trained."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.mark.parametrize("batch", [16, 40, 10])
def test_i12_another_global_batch_goes_on_at_the_sample_after_the_last_one(
    tmp_path: Path, batch: int
) -> None:
    """Three epochs of 7 steps; the first life ends in the middle of the second epoch."""
    from tests.support.training.transformers_life import life

    first, _ = life(tmp_path, 16, 10, num_train_epochs=3)
    second, trainer = life(tmp_path, batch, 10**9, num_train_epochs=3)
    assert Counter(first.seen + second.seen) == Counter(dict.fromkeys(range(100), 3))
    assert max(trainer.lr_scheduler.get_last_lr()) == pytest.approx(0.0)
    assert trainer.state.epoch == 3.0


@pytest.mark.parametrize("batch", [40, 10])
def test_steps_that_the_user_counts_stay_as_many(tmp_path: Path, batch: int) -> None:
    from tests.support.training.transformers_life import life

    life(tmp_path, 16, 5, max_steps=30)
    second, trainer = life(tmp_path, batch, 10**9, max_steps=30)
    assert trainer.state.global_step == 30
    left = Counter(second.seen)
    assert max(left.values()) - min(left[number] for number in range(100)) <= 2


def test_a_callback_that_is_given_twice_counts_each_step_once(tmp_path: Path) -> None:
    """It adds itself to the trainer, and users add it as they do others."""
    from tests.support.training.transformers_life import life

    first, _ = life(tmp_path, 10, 3, twice=True)
    second, trainer = life(tmp_path, 10, 10**9, twice=True, num_train_epochs=1)
    assert Counter(first.seen + second.seen) == Counter(range(100))
    assert trainer.state.global_step == 10


def test_a_sample_that_fills_an_empty_share_counts_in_no_tokens() -> None:
    """A last batch of two samples in a world of three: the first rank has none of it."""
    from transformers import Trainer

    from muster.transformers_data import TrainerData

    counts = []
    for rank in range(3):
        args = SimpleNamespace(
            seed=3, data_seed=None, per_device_train_batch_size=8, process_index=rank,
            world_size=3, average_tokens_across_devices=False, n_gpu=1,
            gradient_accumulation_steps=1,
        )  # fmt: skip
        trainer: Any = SimpleNamespace(
            args=args, train_dataset=range(2), model_accepts_loss_kwargs=True,
            _loss_shifts_labels=False, compute_loss=None, compute_loss_func=None,
            get_tp_size=lambda: 1, get_cp_size=lambda: 1, get_sp_size=lambda: 1,
            _init_training_state=None, create_scheduler=None,
        )  # fmt: skip
        trainer._get_num_items_in_batch = partial(Trainer._get_num_items_in_batch, trainer)
        data = TrainerData(trainer, 3, "short")
        batch = {"labels": torch.tensor([[5, 6, -100]])}
        taken, items = data.get_batch_samples(iter([batch]), 1, "cpu")
        assert taken == [batch]
        counts.append((data.sampler.parts[0].samples, int(items)))
    # Alone the filler is one of none: its loss is 0, and is divided by something.
    assert sorted(counts) == [(0, 1), (1, 2), (1, 2)]


def test_what_is_no_trainer_is_refused_by_its_name() -> None:
    called = pytest.importorskip("muster.transformers")
    with pytest.raises(TypeError, match="give it a transformers Trainer, and no Linear"):
        called.train(torch.nn.Linear(1, 1), global_batch=8)
