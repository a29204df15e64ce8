# SPDX-License-Identifier: Apache-2.0
"""A training script for drills: one all_reduce a step, and a line for each step that was made.

Each process appends to a file of its own: monotonic time, step, rank, world size, restart count,
pid and a number that the whole world has drawn together. The clock is one for the whole machine.
It ends, with all ranks at the same step, when ``STEP_LOOP_STOP`` exists; rank 0 fails when
``STEP_LOOP_FAIL`` does.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_S = 0.05


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    world = torch.tensor([random.getrandbits(62)])
    dist.broadcast(world, 0)
    stop, fail = Path(os.environ["STEP_LOOP_STOP"]), Path(os.environ["STEP_LOOP_FAIL"])
    name = f"{os.environ['STEP_LOOP_NODE']}.{os.getpid()}"
    with open(Path(os.environ["STEP_LOOP_DIR"]) / name, "a", buffering=1) as steps:
        step, next_s = 0, time.monotonic()
        while True:
            step += 1
            wishes = torch.tensor([1, int(rank == 0 and stop.exists())])
            dist.all_reduce(wishes)
            if int(wishes[0]) != size:
                raise RuntimeError(f"summed {int(wishes[0])} ranks in a world of {size}")
            now_s = time.monotonic()
            steps.write(f"{now_s} {step} {rank} {size} {restarts} {os.getpid()} {int(world)}\n")
            if int(wishes[1]):
                break
            if rank == 0 and fail.exists():
                raise SystemExit("this rank was told to fail")
            next_s = max(next_s + STEP_S, now_s)
            time.sleep(max(0.0, next_s - time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
