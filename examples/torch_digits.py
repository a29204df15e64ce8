# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits on an elastic world: a small convolutional net, data-parallel, on real images.

    muster local --nodes 2 --max 4 --event add@30s -- torchrun examples/torch_digits.py

The data are the 1797 images that come inside scikit-learn. Each step takes the same global batch,
whatever the world size, and every rank its share of it, so that a job that lost and gained nodes
ends where an undisturbed one does. Rank 0 saves at the end of each epoch, and where a drain asks
for it; a new world goes on from there.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import muster

GLOBAL_BATCH = 128
TEST_IMAGES = 360
KEPT = 3
SEED = 20


def load_images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images (1 x 8 x 8, 0 to 1) and labels, for training and for the test; every rank the same."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    images, labels = images[order], labels[order]
    return images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]


def build_net() -> nn.Module:
    """Two convolutions and one hidden layer: 40 thousand weights."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def path_of(directory: Path, step: int, tag: str) -> Path:
    """The checkpoint of one step; no other world has this tag."""
    return directory / f"torch_digits-{tag}-{step:08d}.pt"


def newest(directory: Path) -> Path | None:
    """The checkpoint of the last commit; if there is none on record, the newest that lies there."""
    committed = muster.last_commit()
    if committed is not None and path_of(directory, committed, committed.tag).exists():
        return path_of(directory, committed, committed.tag)
    found = directory.glob("torch_digits-*.pt")
    return max(found, key=lambda path: path.stem.rpartition("-")[2], default=None)


def load_checkpoint(directory: Path) -> dict[str, Any] | None:
    """Rank 0's checkpoint, handed to every rank, so that no two go on from different steps."""
    found: list[dict[str, Any] | None] = [None]
    if dist.get_rank() == 0 and (path := newest(directory)) is not None:
        found[0] = torch.load(path, weights_only=True)
    dist.broadcast_object_list(found, 0)
    return found[0]


def save_checkpoint(directory: Path, state: dict[str, Any]) -> None:
    """Write aside and rename into place: a kill leaves no half of a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(directory, state["step"], muster.save_tag())
    aside = path.with_suffix(".tmp")
    torch.save(state, aside)
    aside.replace(path)
    # Tags sort as worlds form: what a later world has saved stays.
    mine = sorted(one for one in directory.glob("torch_digits-*.pt") if one <= path)
    for old in mine[:-KEPT]:
        old.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument(
        "--step-ms", type=float, default=200.0, help="a step takes at least this; 0: full speed"
    )
    parser.add_argument("--checkpoint-dir", default=os.environ.get("CHECKPOINT_DIR", "checkpoints"))
    arguments = parser.parse_args()
    checkpoints = Path(arguments.checkpoint_dir)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load_images()
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    start = 0
    if (saved := load_checkpoint(checkpoints)) is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    model = DistributedDataParallel(net)
    print(f"rank {rank} of {world_size} starts at step {start}", flush=True)

    steps_per_epoch = len(labels) // GLOBAL_BATCH
    next_step_s = time.monotonic()
    with muster.drain(start, checkpoints) as drain:
        for step in range(start + 1, arguments.epochs * steps_per_epoch + 1):
            epoch, index = divmod(step - 1, steps_per_epoch)
            shuffle = torch.Generator().manual_seed(SEED + epoch)
            order = torch.randperm(len(labels), generator=shuffle)
            batch = order[index * GLOBAL_BATCH : (index + 1) * GLOBAL_BATCH]
            mine = batch[rank::world_size]
            # The ranks' gradients are averaged: this weight makes that the mean over the batch,
            # also where the batch does not divide evenly.
            loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum")
            optimizer.zero_grad()
            (loss * world_size / GLOBAL_BATCH).backward()
            optimizer.step()
            if drain.commit_due(step) or step % steps_per_epoch == 0:
                if rank == 0:
                    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                    save_checkpoint(checkpoints, {**state, "step": step})
                drain.committed(step)
            next_step_s = max(next_step_s + arguments.step_ms / 1000, time.monotonic())
            time.sleep(max(0.0, next_step_s - time.monotonic()))

    if rank == 0:
        with torch.no_grad():
            right = int((net(test_images).argmax(1) == test_labels).sum())
        print(
            f"test accuracy {right / TEST_IMAGES:.1%} ({right} of {TEST_IMAGES} images) "
            f"after {arguments.epochs} epochs",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
