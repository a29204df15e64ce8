# SPDX-License-Identifier: Apache-2.0
"""accelerate in three lines of Muster: the loop is Muster's, gradients and saves are accelerate's.

    muster local --nodes 2 --event drain:rank0@world2+5s -- torchrun examples/accelerate_train.py

accelerate prepares the model and the optimizer, but not the data: Muster divides them.
"""

from __future__ import annotations

import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

import muster

EPOCHS = int(os.environ.get("EPOCHS", "4"))
STEP_S = 0.1  # there is time to watch; 0: full speed
DIRECTORY = os.path.join(os.environ.get("CHECKPOINT_DIR", "checkpoints"), "accelerate_train")


def main() -> None:
    accelerator = Accelerator(cpu=True)  # leave it out where there are GPUs
    torch.manual_seed(0)
    inputs = torch.randn(4096, 8)
    rows = TensorDataset(inputs, inputs.sin())
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    options = {"accelerator": accelerator, "global_batch": 64, "epochs": EPOCHS}
    with muster.train(model, optimizer, rows, directory=DIRECTORY, **options) as training:
        world = f"rank {accelerator.process_index} of {accelerator.num_processes}"
        print(f"{world} starts at step {training.steps}", flush=True)
        for given, wanted in training:
            training.step((model(given) - wanted).square().mean())
            time.sleep(STEP_S)
    if accelerator.is_main_process:
        loss = (net(inputs) - inputs.sin()).square().mean()
        print(f"loss {loss.item():.5f} after {training.steps} steps", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
