# SPDX-License-Identifier: Apache-2.0
"""A Trainer of Lightning whose world changes in place; logs steps and samples."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

import muster.lightning
from tests.support.training.in_place_log import BATCH, ROWS, SEED, InPlaceLog


class Net(LightningModule):
    def __init__(self, made: InPlaceLog) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.made = made

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number, given = batch
        self.made.take(number.tolist())
        return (self.net(given) - given.sin()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class Log(Callback):
    def __init__(self, made: InPlaceLog) -> None:
        self.made = made
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.made.begin()
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            if self.made.ends(self.step):
                trainer.should_stop = True


def main() -> None:
    made = InPlaceLog()
    rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(SEED))
    muster.lightning.fit(
        Net(made),
        list(enumerate(rows)),
        directory=os.path.join(os.environ["CHECKPOINT_DIR"], "lightning"),
        global_batch=BATCH,
        micro_batch=6,
        seed=SEED,
        save_every=10**6,
        loader={"num_workers": 1},
        in_place=True,
        accelerator="cpu",
        max_steps=100_000,
        callbacks=[Log(made)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


if __name__ == "__main__":
    main()
