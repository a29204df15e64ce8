# SPDX-License-Identifier: Apache-2.0
"""A training of a newcomer, who has not read anything: torch, and a module of his own."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import agent

assert agent.__doc__ == "The newcomer's own."
STEPS = int(os.environ.get("STEPS", "20"))

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
if dist.get_rank() == 0:
    print("trained", STEPS, "steps")
dist.destroy_process_group()
