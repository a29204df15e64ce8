# SPDX-License-Identifier: Apache-2.0
"""Trains a small net with the Trainer of Lightning, and logs which samples each step trained.

    data_lightning.py HOW SAMPLES STEPS

``HOW``: ``muster`` (the callback sees to the data), or ``plain``: an epoch of the trainer's own.
``STOP_AFTER``: end at this step, as if the world had ended there.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from muster.data import ElasticSampler
from muster.lightning import MusterCallback, last_checkpoint
from tests.support.training.sample_log import SampleLog

HOW, SAMPLES, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
GLOBAL_BATCH, MICRO_BATCH, SEED = 24, 6, 11
STEP_S = float(os.environ.get("STEP_S", "0"))
STOP_AFTER = int(os.environ.get("STOP_AFTER", "0"))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.samples: SampleLog | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number, given, wanted = batch
        loss = (self.net(given) - wanted).square().mean()
        assert self.samples is not None
        self.samples.add(number.tolist(), loss.item() * len(number))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [schedule]


class Log(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Net)
        self.step = trainer.global_step
        pl_module.samples = SampleLog(self.step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Net)
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            assert pl_module.samples is not None
            pl_module.samples.ends(self.step)
            time.sleep(STEP_S)
            if self.step == STOP_AFTER:
                trainer.should_stop = True


def main() -> None:
    torch.set_num_threads(1)
    given = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(SEED))
    data = [(number, row, row.sin()) for number, row in enumerate(given)]
    directory = os.path.join(os.environ["CHECKPOINT_DIR"], f"lightning_{HOW}")
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    sampler = None
    if HOW == "muster":
        sampler = ElasticSampler(SAMPLES, SEED, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH)
        loader: Any = DataLoader(data, batch_sampler=sampler)
    else:
        loader = DataLoader(data, batch_size=MICRO_BATCH, shuffle=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        use_distributed_sampler=HOW == "plain",
        max_epochs=1 if HOW == "plain" else 2,
        max_steps=-1 if HOW == "plain" else STEPS,
        callbacks=[
            Log(),
            MusterCallback(directory, sampler, steps_only=sampler is None),
            ModelCheckpoint(
                directory,
                every_n_train_steps=int(os.environ.get("SAVE_EVERY", "10")),
                save_top_k=-1,
            ),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader, ckpt_path=last_checkpoint(directory))


if __name__ == "__main__":
    main()
