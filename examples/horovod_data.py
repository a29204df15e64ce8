# SPDX-License-Identifier: Apache-2.0
"""Elastic Horovod whose data go on where they were: each row is trained once an epoch.

    muster local --nodes 2 --max 4 --event add@30s -- horovodrun python examples/horovod_data.py

The cursor is part of the elastic state: a commit keeps it with the weights, and a roll-back puts
both back.
"""

from __future__ import annotations

import os
import time

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState
from torch import nn

import muster
from muster.data import ElasticSampler

EPOCHS = int(os.environ.get("EPOCHS", "4"))
STEP_S = 0.1  # there is time to watch; 0: full speed
ROWS, BATCH = 4096, 64  # a batch is of all ranks together


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, 8)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=net.named_parameters())

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: TorchState) -> None:
        # Made anew in each world, which has other ranks.
        sampler = ElasticSampler(
            ROWS, seed=7, global_batch=BATCH, rank=hvd.rank(), world_size=hvd.size()
        )
        sampler.go_to(state.cursor)
        print(f"rank {hvd.rank()} of {hvd.size()} goes on at {sampler.cursor}", flush=True)
        while sampler.epoch < EPOCHS:
            for rows, part in sampler.follow(sampler):
                loss = (net(inputs[rows]) - inputs[rows].sin()).square().mean()
                optimizer.zero_grad()
                (loss * part.weight).backward()  # Horovod averages over the ranks
                optimizer.step()
                state.step += 1
                state.cursor = sampler.cursor
                muster.report_step(state.step, rank=hvd.rank(), world_size=hvd.size())
                time.sleep(STEP_S)
                state.commit()

    train(TorchState(model=net, optimizer=optimizer, step=0, cursor=None))
    if hvd.rank() == 0:
        loss = (net(inputs) - inputs.sin()).square().mean()
        print(f"loss {loss.item():.5f} after {EPOCHS} epochs", flush=True)


if __name__ == "__main__":
    main()
