# SPDX-License-Identifier: Apache-2.0
"""Lightning on several nodes: one call in place of Trainer and fit, and no step is lost.

    muster local --nodes 2 --event drain:rank0@world2+5s -- torchrun examples/lightning_sine.py

The call gives Lightning the number of nodes, and the loader a sampler that goes on where the data
were, so that no row is read twice or left out in a world of another size.
"""

from __future__ import annotations

import os
import time

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

import muster.lightning

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
    inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
    trainer = muster.lightning.fit(
        Sine(),
        TensorDataset(inputs, inputs.sin()),
        directory=CHECKPOINTS,
        global_batch=BATCH,
        save_every=100,
        accelerator="cpu",  # leave it out where there are GPUs
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
    )
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"]
        print(f"loss {loss:.5f} after {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
