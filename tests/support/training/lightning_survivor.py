# SPDX-License-Identifier: Apache-2.0
"""A rank with a Trainer of Lightning that lives through changes of its world."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn

import muster.lightning
from muster.world import World
from tests.support.training.survivor import BATCH, PACE_S, ROWS, Case, agree, digest_of, entered

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


class Log(Callback):
    """Writes each step, and the state in which each world begins."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.lines = (case.folder / f"{case.name}.jsonl").open("a", buffering=1)
        self.world: World | None = None
        self.number = self.step = -1

    def say(self, **fields: Any) -> None:
        self.lines.write(json.dumps(fields) + "\n")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.world is not None
        assert isinstance(pl_module, Net)
        pl_module.rows.clear()
        self.step, self.number = trainer.global_step, self.world._me.formed
        self.say(world=self.number, at=self.step, digest=digest(trainer), rank=trainer.global_rank)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Net)
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        self.say(step=self.step, world=self.number, rows=pl_module.rows, whole=True)
        pl_module.rows.clear()
        time.sleep(PACE_S)
        if agree(self.case, self.step):
            trainer.should_stop = True


def digest(trainer: Trainer) -> str:
    (schedule,) = trainer.lr_scheduler_configs
    return digest_of(trainer.lightning_module, trainer.optimizers[0], schedule.scheduler)


def train(case: Case) -> None:
    """Train until the goal; end the process."""
    entered(case)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    os.environ.update(LOCAL_WORLD_SIZE="1", TORCHELASTIC_RUN_ID="drill")
    log = Log(case)
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(7))
    data = list(enumerate(rows))
    enter = World.__enter__

    def noted(world: World) -> World:
        log.world = world
        return enter(world)

    World.__enter__ = noted  # type: ignore[method-assign]
    trainer = muster.lightning.fit(
        Net(case.dies_at), data, directory=str(case.folder / "checkpoints"), global_batch=BATCH,
        micro_batch=3, in_place=True, accelerator="cpu", max_steps=MAX_STEPS, callbacks=[log],
        plugins=[TorchElasticEnvironment()], logger=False, enable_progress_bar=False,
        enable_model_summary=False, validation=torch.utils.data.DataLoader(data, 24),
        save_every=10**6,
    )  # fmt: skip
    log.say(ended=trainer.global_step, digest=digest(trainer))
    os._exit(0)
