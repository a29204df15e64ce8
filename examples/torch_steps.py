# SPDX-License-Identifier: Apache-2.0
"""A step loop and nothing else, for drills: one all_reduce a step, a checkpoint every 20 steps.

    muster local --nodes 3 --event kill:rank0@world3+5s -- torchrun examples/torch_steps.py

Where a drain asks for it, the step is saved as well. Rank 0 alone has to save something, into a
directory that all nodes share; every rank says that it has done its part.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import muster

CHECKPOINT_EVERY_STEPS = 20


def load_step(path: Path) -> int:
    """The step that the last checkpoint was taken at, 0 without one."""
    step = int(json.loads(path.read_text())["step"]) if path.exists() else 0
    return muster.check_start(step, path.parent)


def save_step(path: Path, step: int) -> None:
    """Write the checkpoint aside and rename it into place: a kill leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(json.dumps({"step": step}))
    aside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--checkpoint-dir", default=os.environ.get("CHECKPOINT_DIR", "checkpoints"))
    arguments = parser.parse_args()
    checkpoint = Path(arguments.checkpoint_dir) / "torch_steps.json"

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Rank 0's view of the checkpoint is everybody's, so that no two ranks start at different steps.
    start = torch.tensor([load_step(checkpoint) if rank == 0 else 0])
    dist.broadcast(start, 0)
    print(f"rank {rank} of {world_size} starts at step {int(start)}", flush=True)

    next_step_s = time.monotonic()
    with muster.drain() as drain:
        for step in range(int(start) + 1, arguments.steps + 1):
            ranks = torch.ones(1)
            dist.all_reduce(ranks)
            if int(ranks) != world_size:
                raise RuntimeError(f"step {step}: {int(ranks)} ranks in a world of {world_size}")
            if drain.commit_due(step) or step % CHECKPOINT_EVERY_STEPS == 0:
                if rank == 0:
                    save_step(checkpoint, step)
                drain.committed(step)
            next_step_s = max(next_step_s + arguments.step_ms / 1000, time.monotonic())
            time.sleep(max(0.0, next_step_s - time.monotonic()))

    print(f"rank {rank} of {world_size} done at step {arguments.steps}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
