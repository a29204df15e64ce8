# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training in three lines of Muster: no step is lost, and no sample.

    muster local --nodes 2 --event drain:rank0@world2+5s -- torchrun examples/torch_train.py

The batch of all ranks together is the same in every world, so the learning rate stays as it is.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import muster

EPOCHS = int(os.environ.get("EPOCHS", "4"))
STEP_S = 0.1  # there is time to watch; 0: full speed
DIRECTORY = os.path.join(os.environ.get("CHECKPOINT_DIR", "checkpoints"), "torch_train")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(4096, 8)
    rows = TensorDataset(inputs, inputs.sin())
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with muster.train(
        model, optimizer, rows, global_batch=64, epochs=EPOCHS, directory=DIRECTORY
    ) as training:
        world = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        print(f"{world} starts at step {training.steps}", flush=True)
        for given, wanted in training:
            training.step((model(given) - wanted).square().mean())
            time.sleep(STEP_S)
    if dist.get_rank() == 0:
        loss = (model.module(inputs) - inputs.sin()).square().mean()
        print(f"loss {loss.item():.5f} after {training.steps} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
