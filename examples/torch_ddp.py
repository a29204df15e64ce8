# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training that loses no step when a node has to go: the whole script, torch alone.

    muster local --nodes 2 --event drain:rank0@world2+5s -- torchrun examples/torch_ddp.py

Rank 0 saves the whole model, and every rank is handed what it loads. Which rows come next follows
from the step, so that nothing about the data has to be saved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import muster

STEPS = int(os.environ.get("STEPS", "400"))
STEP_S = 0.1  # there is time to watch; 0: full speed
ROWS, BATCH = 4096, 64  # a batch is of all ranks together
DIRECTORY, KEPT = Path(os.environ.get("CHECKPOINT_DIR", "checkpoints")), 3


def path_of(step: int, tag: str) -> Path:
    """No other world has this tag: a world that is cut off, and trains on, writes other files."""
    return DIRECTORY / f"torch_ddp-{tag}-{step:08d}.pt"


def save(step: int, parts: dict[str, Any]) -> None:
    """Rank 0 writes aside and renames: a kill leaves no half of a checkpoint."""
    if dist.get_rank() == 0:
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        path = path_of(step, muster.save_tag())
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"step": step, **saved}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        # Tags sort as worlds form: what a later world has saved stays.
        for old in sorted(one for one in DIRECTORY.glob("torch_ddp-*.pt") if one <= path)[:-KEPT]:
            old.unlink()


def newest() -> Path | None:
    """The checkpoint of the last commit; if there is none on record, the newest that lies there."""
    committed = muster.last_commit()
    if committed is not None and path_of(committed, committed.tag).exists():
        return path_of(committed, committed.tag)
    found = DIRECTORY.glob("torch_ddp-*.pt")
    return max(found, key=lambda path: path.stem.rpartition("-")[2], default=None)


def load(parts: dict[str, Any]) -> int:
    """Hand every rank what rank 0 finds; return its step, 0 where there is no checkpoint yet."""
    found: list[Any] = [{"step": 0}]
    if dist.get_rank() == 0 and (path := newest()) is not None:
        found = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(found)
    start: int = found[0]["step"]
    if start:
        for name, part in parts.items():
            part.load_state_dict(found[0][name])
    return start


def shares(start: int) -> Iterator[list[int]]:
    """This rank's rows of each batch after step ``start``: the batches of a world of any size."""
    for step in range(start, STEPS):
        epoch, index = divmod(step, ROWS // BATCH)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
        batch = order[index * BATCH : (index + 1) * BATCH]
        yield batch[dist.get_rank() :: dist.get_world_size()]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, 8)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    parts = {"net": net, "optimizer": optimizer}
    start = load(parts)
    print(f"rank {rank} of {world_size} starts at step {start}", flush=True)

    model = DistributedDataParallel(net)
    rows = DataLoader(TensorDataset(inputs, inputs.sin()), batch_sampler=shares(start))
    with muster.drain(start, DIRECTORY) as drain:
        for step, (given, wanted) in enumerate(rows, start + 1):
            # The ranks' gradients are averaged: this weight makes that the mean over the batch.
            difference = model(given.to(device)) - wanted.to(device)
            loss = difference.square().sum() * world_size / (BATCH * 8)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if drain.commit_due(step) or step % 100 == 0:
                save(step, parts)
                drain.committed(step)
            time.sleep(STEP_S)

    if rank == 0:
        loss = (net(inputs.to(device)).cpu() - inputs.sin()).square().mean()
        print(f"loss {loss.item():.5f} after {STEPS} steps", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
