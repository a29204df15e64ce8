# SPDX-License-Identifier: Apache-2.0
"""One life of a training with a real Trainer of transformers, on some rows.

To be imported by a test itself, not by its file: it takes two seconds, and each process of the
tests reads all files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from muster.transformers import MusterCallback, last_checkpoint

ROWS = [{"number": number, "given": torch.ones(2)} for number in range(100)]


class Net(nn.Module):
    """Notes which samples it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.seen: list[int] = []

    def forward(self, number: Any, given: Any) -> dict[str, Any]:
        self.seen += number.tolist()
        return {"loss": self.net(given).square().mean()}


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def trainer_of(
    directory: Path,
    stop: int,
    *,
    net: nn.Module | None = None,
    data: Any = ROWS,
    kind: type[Trainer] = Trainer,
    **given: Any,
) -> Trainer:
    """Return a trainer that saves and ends at the step ``stop``."""
    usual: dict[str, Any] = {"per_device_train_batch_size": 8, "save_strategy": "no"}
    arguments = TrainingArguments(
        str(directory), seed=3, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", remove_unused_columns=False, **{**usual, **given},
    )  # fmt: skip
    return kind(net or Net(), arguments, train_dataset=data, callbacks=[StopAt(stop)])


def life(
    directory: Path,
    batch: int,
    stop: int,
    *,
    twice: bool = False,
    replace: bool = False,
    **given: Any,
) -> tuple[Any, Trainer]:
    trainer = trainer_of(directory, stop, **given)
    with MusterCallback(trainer, global_batch=batch, replace=replace) as callback:
        if twice:
            trainer.add_callback(callback)
            trainer.add_callback(MusterCallback())
        trainer.train(resume_from_checkpoint=last_checkpoint(str(directory)))
    return trainer.model, trainer
