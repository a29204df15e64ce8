# SPDX-License-Identifier: Apache-2.0
"""A script as a user of Lightning has one: a weight that counts down by one an optimizer step.

Arguments: checkpoint directory, log, steps in all. The log is given the weight after each optimizer
step.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from muster.lightning import MusterCallback, last_checkpoint


class Counter(LightningModule):
    def __init__(self, batch_s: float) -> None:
        super().__init__()
        self.batch_s = batch_s
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(self.batch_s)
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        super().optimizer_step(*arguments, **named)
        with open(sys.argv[2], "a") as log:
            log.write(f"{-self.weight.item():.0f}\n")


def main() -> None:
    every = int(os.environ.get("SAVE_STEPS", "0"))
    periodic = []
    if every:
        periodic = [ModelCheckpoint(sys.argv[1], every_n_train_steps=every, save_top_k=-1)]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=int(sys.argv[3]),
        accumulate_grad_batches=2,
        callbacks=[MusterCallback(sys.argv[1], steps_only=True), *periodic],
        logger=False,
        enable_checkpointing=bool(periodic),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader([torch.ones(1) for _ in range(1000)])
    last = last_checkpoint(sys.argv[1])
    # Who trains from the beginning is told to save at steps that are still to come.
    trainer.fit(Counter(0.1 if last is None else 0.01), data, ckpt_path=last)


if __name__ == "__main__":
    main()
