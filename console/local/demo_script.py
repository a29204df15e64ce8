# SPDX-License-Identifier: Apache-2.0
"""The training of ``muster local --demo``: a small net learns a sine wave, data-parallel.

It shows the four lines of Muster that an own script needs, marked below; one that trains in a
cluster names its files by ``muster.save_tag()``, too (docs/training.md). It saves every 20 steps,
and when a drain asks for it.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import muster  # Muster, 1 of 4

STEPS = int(os.environ.get("STEPS", "900"))
STEP_S = 0.05
BATCH = 256
SAVED = Path(os.environ["CHECKPOINT_DIR"], "demo.pt")


def batch_of(step: int, rank: int, world_size: int) -> torch.Tensor:
    """Return this rank's share of the step's batch, which is the same in a world of any size."""
    inputs = torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(step))
    return (2 * inputs - 1)[rank::world_size]


def load(net: nn.Module) -> int:
    """Give every rank what rank 0 finds; return its step."""
    found = (
        [torch.load(SAVED, weights_only=True)]
        if dist.get_rank() == 0 and SAVED.exists()
        else [None]
    )
    dist.broadcast_object_list(found, 0)
    if found[0] is not None:
        net.load_state_dict(found[0]["net"])
    return int(found[0]["step"]) if found[0] else 0


def save(net: nn.Module, step: int) -> None:
    """Write aside and rename into place: a kill leaves no half of a checkpoint."""
    aside = SAVED.with_suffix(".part")
    torch.save({"net": net.state_dict(), "step": step}, aside)
    aside.replace(SAVED)


def main() -> None:
    """Train, and print the loss at the end."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(20)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    start = load(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = torch.zeros(())
    with muster.drain(start=start, where=SAVED.parent) as drain:  # Muster, 2 of 4
        for step in range(start + 1, STEPS + 1):
            began_s = time.monotonic()
            inputs = batch_of(step, rank, world_size)
            loss = (net(inputs) - torch.sin(math.pi * inputs)).square().sum() / BATCH
            optimizer.zero_grad()
            loss.backward()
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if drain.commit_due(step) or step % 20 == 0:  # Muster, 3 of 4
                if rank == 0:
                    save(net, step)
                drain.committed(step)  # Muster, 4 of 4
            time.sleep(max(0.0, began_s + STEP_S - time.monotonic()))
    loss = loss.detach()
    dist.all_reduce(loss)
    if rank == 0:
        print(f"trained {STEPS} steps; loss {float(loss):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
