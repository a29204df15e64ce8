# SPDX-License-Identifier: Apache-2.0
"""A rank with a Trainer of Lightning that lives through changes of its world."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn

import muster.lightning
from tests.support.training.survivor import BATCH, ROWS, Case, TrainerLog, digest_of, entered

MAX_STEPS = 200


class Net(LightningModule):
    """Notes which rows it was trained on."""

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        torch.manual_seed(os.getpid())  # only a handed state makes two ranks alike
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
        self.rows: list[int] = []
        self._dies_at = dies_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number, given = batch
        self.rows += number.tolist()
        loss = (self.net(given) - given.sin()[:, :2]).square().mean()
        if self.global_step + 1 == self._dies_at:
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("wrong", (self.net(batch[1])).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Log(TrainerLog, Callback):
    """Writes each step, and the state in which each world begins."""

    step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Net)
        pl_module.rows.clear()
        self.step = trainer.global_step
        self.begin(self.step, trainer.global_rank, digest(trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Net)
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            trainer.should_stop |= self.make(self.step, pl_module.rows)


def digest(trainer: Trainer) -> str:
    (schedule,) = trainer.lr_scheduler_configs
    return digest_of(trainer.lightning_module, trainer.optimizers[0], schedule.scheduler)


def train(case: Case) -> None:
    """Train until the goal; end the process."""
    entered(case)
    os.environ.update(LOCAL_WORLD_SIZE="1", TORCHELASTIC_RUN_ID="drill")
    log = Log(case)
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(7))
    data = list(enumerate(rows))
    trainer = muster.lightning.fit(
        Net(case.dies_at), data, directory=str(case.folder / "checkpoints"), global_batch=BATCH,
        micro_batch=3, in_place=True, accelerator="cpu", max_steps=MAX_STEPS, callbacks=[log],
        plugins=[TorchElasticEnvironment()], logger=False, enable_progress_bar=False,
        enable_model_summary=False, validation=torch.utils.data.DataLoader(data, 24),
        save_every=10**6,
    )  # fmt: skip
    log.say(ended=trainer.global_step, digest=digest(trainer))
    os._exit(0)
