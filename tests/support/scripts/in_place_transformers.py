# SPDX-License-Identifier: Apache-2.0
"""A Trainer of transformers whose world changes in place; logs steps and samples."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import muster.transformers
from tests.support.training.in_place_log import BATCH, ROWS, SEED, InPlaceLog


class Net(nn.Module):
    def __init__(self, log: InPlaceLog) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.log = log

    def forward(self, number: Any, given: Any) -> dict[str, Any]:
        self.log.take(number.tolist())
        return {"loss": (self.net(given) - given.sin()).square().mean()}


class Log(TrainerCallback):
    def __init__(self, log: InPlaceLog) -> None:
        self.log = log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.log.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.log.ends(state.global_step):
            control.should_training_stop = True


def main() -> None:
    log = InPlaceLog()
    rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(SEED))
    data = [{"number": number, "given": row} for number, row in enumerate(rows)]
    arguments = TrainingArguments(
        output_dir=os.path.join(os.environ["CHECKPOINT_DIR"], "transformers"),
        per_device_train_batch_size=6,
        max_steps=100_000,
        learning_rate=0.01,
        save_steps=1000,
        seed=SEED,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=10,
        dataloader_num_workers=1,
        remove_unused_columns=False,
    )
    trainer = Trainer(Net(log), arguments, train_dataset=data, callbacks=[Log(log)])
    muster.transformers.train(trainer, global_batch=BATCH, in_place=True)


if __name__ == "__main__":
    main()
