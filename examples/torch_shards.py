# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training on shards: a fast node trains more records, and each counts once.

    muster local --nodes 3 --event kill:rank0@world3+5s -- torchrun examples/torch_shards.py

Every rank trains for a while in each step, as many records as it can, and the gradients are those
of all records together. ``SLOW=node-1`` makes one node five times slower.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import muster
import muster.data

RECORDS, EPOCHS, SHARD, BATCH = 20_000, 2, 50, 10
STEP_S, RECORD_S = (
    0.1,
    0.002,
)  # a step lasts 0.1 s; a record takes 2 ms, so that there is time to watch
DIRECTORY = Path(os.environ.get("CHECKPOINT_DIR", "checkpoints"))


def path_of(step: int, tag: str) -> Path:
    """No other world has this tag: one that is cut off, and trains on, writes other files."""
    return DIRECTORY / f"torch_shards-{tag}-{step:08d}.pt"


def save(step: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 saves; the checkpoint before it stays, for the last commit may still be that one."""
    if dist.get_rank() == 0:
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        parts = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        path = path_of(step, muster.save_tag())
        torch.save(parts, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        # Tags sort as worlds form: what a later world has saved stays.
        mine = sorted(one for one in DIRECTORY.glob("torch_shards-*.pt") if one <= path)
        for old in mine[:-5]:
            old.unlink()
    dist.barrier()  # nobody says that it is saved before it is


def load(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint of the last commit on every rank; return its step."""
    committed = muster.last_commit()
    if committed is None:
        return 0
    parts = torch.load(path_of(committed, committed.tag), weights_only=True)
    net.load_state_dict(parts["net"])
    optimizer.load_state_dict(parts["optimizer"])
    return int(committed)


def step_once(net: nn.Module, inputs: torch.Tensor, shards: muster.data.Shards) -> tuple[int, bool]:
    """Add up the gradients of what this rank can train in one step, then those of all ranks.

    Returns how many records all ranks trained, and whether all of them know that this is the end.
    """
    trained, end_s = 0, time.monotonic() + STEP_S
    record_s = RECORD_S * (5 if os.environ.get("MUSTER_MEMBER") == os.environ.get("SLOW") else 1)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    while time.monotonic() < end_s:
        batch = shards.take(BATCH)
        if not batch:
            break
        (net(inputs[batch]) - inputs[batch].sin()).square().mean(dim=1).sum().backward()
        time.sleep(record_s * len(batch))
        trained += len(batch)
    told = torch.tensor([trained, shards.done])
    dist.all_reduce(told)
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= max(1, int(told[0]))  # the mean over the records of all ranks
    return int(told[0]), int(told[1]) == dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(RECORDS, 8)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    start = step = load(net, optimizer)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} starts at step {start}", flush=True)
    own = 0
    with muster.drain() as drain:
        for epoch in range(EPOCHS):
            shards = muster.data.shards(RECORDS, shard_size=SHARD, epoch=epoch, seed=7, start=start)
            ended = False
            while not ended:
                count, ended = step_once(net, inputs, shards)
                if count:
                    optimizer.step()
                step += 1
                own += count
                if drain.commit_due(step) or step % 20 == 0:
                    save(step, net, optimizer)
                    drain.committed(step)
    if dist.get_rank() == 0:
        loss = (net(inputs) - inputs.sin()).square().mean()
        print(f"loss {loss.item():.5f} after {own} records since step {start}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
