# SPDX-License-Identifier: Apache-2.0
"""A sharded model (FSDP2) on an elastic world: every rank saves its part, by torch's own means.

    muster local --nodes 3 --event drain:rank0@world3+5s -- torchrun examples/torch_dcp.py

Each checkpoint is a directory ``step-<n>`` with a file of each rank's parameters and optimizer
state; a world of another size loads it as well. Its part that is written last, ``.metadata``, is
there once all ranks have written theirs. A step that all have committed is loaded whatever else
lies there; a periodic checkpoint only if it is newer and whole.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import muster

CHECKPOINT_EVERY_STEPS = 100
KEPT = 2
GLOBAL_BATCH = 64
FEATURES = 32


class Checkpoints:
    """The directories of one job; all nodes read and write the same ones."""

    def __init__(
        self,
        directory: Path,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._directory = directory
        self._net, self._optimizer = net, optimizer
        self._device = device

    def save(self, step: int) -> None:
        """Every rank writes its part; returns when all have."""
        net, optimizer = get_state_dict(self._net, self._optimizer)
        path = self._directory / f"step-{step}"
        if dist.get_rank() == 0:  # one that is written again must not look whole meanwhile
            (path / ".metadata").unlink(missing_ok=True)
        dist.barrier()
        dcp.save({"net": net, "optimizer": optimizer}, checkpoint_id=path)
        if dist.get_rank() == 0:
            for older in sorted(self._whole())[:-KEPT]:
                shutil.rmtree(self._directory / f"step-{older}")

    def load(self) -> int:
        """Load the newest step that counts, the same for every rank; 0 if there is none."""
        found = self._whole()
        committed = muster.last_commit()
        if committed is not None and self._part_written_last(committed).exists():
            found.add(committed)  # by its name: a listing may be out of date
        # Rank 0's choice is everybody's: another rank may have looked a moment later.
        chosen = torch.tensor([max(found, default=0)], device=self._device)
        dist.broadcast(chosen, 0)
        step = muster.check_start(int(chosen), self._directory)
        if step:
            net, optimizer = get_state_dict(self._net, self._optimizer)
            state = {"net": net, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=self._directory / f"step-{step}")
            set_state_dict(
                self._net, self._optimizer, model_state_dict=net, optim_state_dict=optimizer
            )
        return step

    def _whole(self) -> set[int]:
        found = self._directory.glob("step-*/.metadata")
        return {int(re.sub("[^0-9]", "", path.parent.name)) for path in found}

    def _part_written_last(self, step: int) -> Path:
        return self._directory / f"step-{step}" / ".metadata"


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a step's batch; the whole is the same in a world of any size."""
    inputs = torch.randn(GLOBAL_BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
    mine = inputs[dist.get_rank() :: dist.get_world_size()]
    return mine, mine.sin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--checkpoint-dir", default=os.environ.get("CHECKPOINT_DIR", "checkpoints"))
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, FEATURES)).to(device)
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    checkpoints = Checkpoints(Path(arguments.checkpoint_dir) / "torch_dcp", net, optimizer, device)
    start = checkpoints.load()
    print(f"rank {rank} of {world_size} starts at step {start}", flush=True)

    next_step_s = time.monotonic()
    with muster.drain() as drain:
        for step in range(start + 1, arguments.steps + 1):
            inputs, wanted = (part.to(device) for part in batch(step))
            # The ranks' gradients are averaged: this weight makes that the mean over the batch.
            loss = (net(inputs) - wanted).square().sum() * world_size / (GLOBAL_BATCH * FEATURES)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if drain.commit_due(step) or step % CHECKPOINT_EVERY_STEPS == 0:
                checkpoints.save(step)
                drain.committed(step)
            next_step_s = max(next_step_s + arguments.step_ms / 1000, time.monotonic())
            time.sleep(max(0.0, next_step_s - time.monotonic()))

    print(f"rank {rank} of {world_size} done at step {arguments.steps}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
