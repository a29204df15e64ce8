# SPDX-License-Identifier: Apache-2.0
"""The same training with the lines of docs/training.md: it loses no step when a pod has to go."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import muster

SAVED = os.path.join(os.environ["CHECKPOINT_DIR"], "step.pt")

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
start = 0
if os.path.exists(SAVED):
    saved = torch.load(SAVED)
    model.load_state_dict(saved["model"])
    start = saved["step"]
with muster.drain() as drain:
    for step in range(start + 1, 301):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        # With all three it is slow: however late the drain is asked for, it is before the end.
        time.sleep(0.5 if dist.get_world_size() == 3 else 0.02)
        if drain.commit_due(step):
            if dist.get_rank() == 0:
                torch.save({"step": step, "model": model.state_dict()}, SAVED)
            drain.committed(step)
if dist.get_rank() == 0:
    print("trained", step, "steps")
dist.destroy_process_group()
