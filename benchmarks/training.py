# SPDX-License-Identifier: Apache-2.0
"""Training script of a benchmark: one all_reduce per step, and a line for each step.

Each step is a line in ``$BENCH_STEPS/<pid>``: monotonic seconds, rank, world size, step. Without a
sidecar beside it, its drain does nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import muster

STEP_S = 0.05
SAVE_S = 0.1


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    path = Path(os.environ["BENCH_STEPS"], str(os.getpid()))
    step = muster.last_commit() or 0
    with open(path, "a", buffering=1) as steps, muster.drain() as drain:
        while True:
            dist.all_reduce(torch.ones(1))
            step += 1
            steps.write(f"{time.monotonic()} {rank} {size} {step}\n")
            if drain.commit_due(step):
                time.sleep(SAVE_S)
                drain.committed(step)
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
