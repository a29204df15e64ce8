# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer on several nodes: MusterCallback loses no step when one of them has to go.

    muster local --nodes 2 --event drain:rank0@world2+5s -- torchrun examples/lightning_sine.py

Lightning is told how many nodes there are, and its loader has a sampler that goes on where the data
were, so that no row is read twice or left out in a world of another size.
"""

from __future__ import annotations

import os
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from muster.data import ElasticSampler
from muster.lightning import MusterCallback, last_checkpoint

STEPS = int(os.environ.get("STEPS", "400"))
STEP_S = 0.1  # there is time to watch; 0: full speed
ROWS, BATCH = 4096, 64  # a batch is of all ranks together
CHECKPOINTS = os.path.join(os.environ.get("CHECKPOINT_DIR", "checkpoints"), "lightning_sine")


class Sine(LightningModule):
    """A small net that learns the sine."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        given, wanted = batch
        time.sleep(STEP_S)
        loss = (self.net(given) - wanted).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def on_train_start(self) -> None:
        print(
            f"rank {self.global_rank} of {self.trainer.world_size}"
            f" starts at step {self.global_step}",
            flush=True,
        )


def main() -> None:
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
    sampler = ElasticSampler(ROWS, seed=7, global_batch=BATCH)
    loader = DataLoader(TensorDataset(inputs, inputs.sin()), batch_sampler=sampler)
    trainer = Trainer(
        accelerator="cpu",  # leave it out where there are GPUs
        devices=ranks_per_node,
        # Lightning does not ask torchrun how many nodes there are, and after a drain there are
        # fewer: it has to be told, each time that torchrun starts the script.
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // ranks_per_node,
        use_distributed_sampler=False,  # the sampler divides the batches
        max_steps=STEPS,
        callbacks=[
            MusterCallback(CHECKPOINTS, sampler),
            ModelCheckpoint(CHECKPOINTS, every_n_train_steps=100),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Sine(), loader, ckpt_path=last_checkpoint(CHECKPOINTS))
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"]
        print(f"loss {loss:.5f} after {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
