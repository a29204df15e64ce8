# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training whose processes live through a join, a drain and a loss: torch alone.

    muster local --nodes 2 --max 3 --event add@20s -- torchrun examples/torch_in_place.py

Beside a sidecar that cannot change worlds in place, or with none, it trains as any torchrun script.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

import muster
from muster.world import World

STEPS = int(os.environ.get("STEPS", "400"))
STEP_S = 0.1  # there is time to watch; 0: full speed
ROWS, BATCH = 4096, 64  # a batch is of all ranks together
DIRECTORY = Path(os.environ.get("CHECKPOINT_DIR", "checkpoints"))


def rows_of(step: int, rank: int, size: int) -> torch.Tensor:
    """This rank's rows of a step: they follow from the step, in a world of any size."""
    epoch, index = divmod(step - 1, ROWS // BATCH)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
    return order[index * BATCH : (index + 1) * BATCH][rank::size]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, 8).to(device)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    parts = {"net": net, "optimizer": optimizer}
    start = 0
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    # Tags sort as worlds form, and steps within them.
    found = max(DIRECTORY.glob("torch_in_place-*.pt"), key=lambda one: one.name, default=None)
    if found is not None:
        loaded = torch.load(found, map_location=device, weights_only=True)
        start = loaded["step"]
        for name, part in parts.items():
            part.load_state_dict(loaded[name])

    def save(step: int) -> None:
        """Save where a restart needs it: rarely, as changes in place need none."""
        if world.rank == 0:
            path = DIRECTORY / f"torch_in_place-{muster.save_tag()}-{step:08d}.pt"
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step, **saved}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)

    backend = "nccl" if on_gpu else "gloo"
    with World(backend, parts, step=start, save=save, save_every=200) as world:
        model = world.replicate(net)
        while world.step < STEPS:
            with world.next_step() as step:
                given = inputs[rows_of(step, world.rank, world.size)]
                # The ranks' gradients are averaged: this weight makes that the mean of the batch.
                loss = (model(given) - given.sin()).square().sum() * world.size / (BATCH * 8)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            time.sleep(STEP_S)
        # A pod may come when all steps are made: it has no world, and no rank.
        if world.step > start and world.rank == 0:
            with torch.no_grad():
                loss = (net(inputs) - inputs.sin()).square().mean()
            print(f"loss {loss.item():.5f} after {world.step} steps", flush=True)


if __name__ == "__main__":
    main()
