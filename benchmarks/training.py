# SPDX-License-Identifier: Apache-2.0
"""Training script of a benchmark: one all_reduce a step, and a line for each step that was made.

A line in ``$BENCH_STEPS/<pid>``: monotonic seconds, rank, world size.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_S = 0.05


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with open(Path(os.environ["BENCH_STEPS"], str(os.getpid())), "a", buffering=1) as steps:
        while True:
            dist.all_reduce(torch.ones(1))
            steps.write(f"{time.monotonic()} {rank} {size}\n")
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
