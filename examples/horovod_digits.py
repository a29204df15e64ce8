# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits with elastic Horovod: a small convolutional net on real images.

    muster local --nodes 2 --max 4 --event add@30s -- horovodrun python examples/horovod_digits.py

The data are the 1797 images that come inside scikit-learn. Each step takes the same global batch,
whatever the world size, and every rank its share of it. The state is committed, in memory, after
each step: a node that leaves costs nothing, and one that dies the step that was under way.
"""

from __future__ import annotations

import argparse
import time

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import muster

GLOBAL_BATCH = 128
TEST_IMAGES = 360
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument(
        "--step-ms", type=float, default=200.0, help="a step takes at least this; 0: full speed"
    )
    arguments = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = load_images()
    net = build_net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=net.named_parameters())
    steps_per_epoch = len(labels) // GLOBAL_BATCH
    last_step = arguments.epochs * steps_per_epoch

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: TorchState) -> None:
        print(f"rank {hvd.rank()} of {hvd.size()} goes on after step {state.step}", flush=True)
        next_step_s = time.monotonic()
        while state.step < last_step:
            epoch, index = divmod(state.step, steps_per_epoch)
            shuffled = torch.Generator().manual_seed(SEED + epoch)
            order = torch.randperm(len(labels), generator=shuffled)
            batch = order[index * GLOBAL_BATCH : (index + 1) * GLOBAL_BATCH]
            mine = batch[hvd.rank() :: hvd.size()]
            # The ranks' gradients are averaged: this weight makes that the mean over the batch,
            # also where the batch does not divide evenly.
            loss = cross_entropy(net(images[mine]), labels[mine], reduction="sum")
            optimizer.zero_grad()
            (loss * hvd.size() / GLOBAL_BATCH).backward()
            optimizer.step()
            state.step += 1
            muster.report_step(state.step, rank=hvd.rank(), world_size=hvd.size())
            next_step_s = max(next_step_s + arguments.step_ms / 1000, time.monotonic())
            time.sleep(max(0.0, next_step_s - time.monotonic()))
            state.commit()

    train(TorchState(model=net, optimizer=optimizer, step=0))
    if hvd.rank() == 0:
        with torch.no_grad():
            right = int((net(test_images).argmax(1) == test_labels).sum())
        print(
            f"test accuracy {right / TEST_IMAGES:.1%} ({right} of {TEST_IMAGES} images) "
            f"after {arguments.epochs} epochs",
            flush=True,
        )


if __name__ == "__main__":
    main()
