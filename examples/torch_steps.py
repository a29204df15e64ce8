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
KEPT = 3


def path_of(directory: Path, step: int, tag: str) -> Path:
    """The checkpoint of one step; no other world has this tag."""
    return directory / f"torch_steps-{tag}-{step:08d}.json"


def load_step(directory: Path) -> int:
    """The step of the last commit, else of the newest checkpoint; 0 without one."""
    committed = muster.last_commit()
    path = None if committed is None else path_of(directory, committed, committed.tag)
    if path is None or not path.exists():
        found = directory.glob("torch_steps-*.json")
        path = max(found, key=lambda one: one.stem.rpartition("-")[2], default=None)
    return int(json.loads(path.read_text())["step"]) if path is not None else 0


def save_step(directory: Path, step: int) -> None:
    """Write the checkpoint aside and rename it into place: a kill leaves no half of one."""
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(directory, step, muster.save_tag())
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"step": step}))
    aside.replace(path)
    # Tags sort as worlds form: what a later world has saved stays.
    mine = sorted(one for one in directory.glob("torch_steps-*.json") if one <= path)
    for old in mine[:-KEPT]:
        old.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--checkpoint-dir", default=os.environ.get("CHECKPOINT_DIR", "checkpoints"))
    arguments = parser.parse_args()
    checkpoints = Path(arguments.checkpoint_dir)

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Rank 0's view of the checkpoint is everybody's, so that no two ranks start at different steps.
    start = torch.tensor([load_step(checkpoints) if rank == 0 else 0])
    dist.broadcast(start, 0)
    print(f"rank {rank} of {world_size} starts at step {int(start)}", flush=True)

    next_step_s = time.monotonic()
    with muster.drain(int(start), checkpoints) as drain:
        for step in range(int(start) + 1, arguments.steps + 1):
            ranks = torch.ones(1)
            dist.all_reduce(ranks)
            if int(ranks) != world_size:
                raise RuntimeError(f"step {step}: {int(ranks)} ranks in a world of {world_size}")
            if drain.commit_due(step) or step % CHECKPOINT_EVERY_STEPS == 0:
                if rank == 0:
                    save_step(checkpoints, step)
                drain.committed(step)
            next_step_s = max(next_step_s + arguments.step_ms / 1000, time.monotonic())
            time.sleep(max(0.0, next_step_s - time.monotonic()))

    print(f"rank {rank} of {world_size} done at step {arguments.steps}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
