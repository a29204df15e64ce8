# SPDX-License-Identifier: Apache-2.0
"""A sharded model (FSDP2) on an elastic world: every rank saves its part, by torch's own means.

    muster local --nodes 3 --event drain:rank0@world3+5s -- torchrun examples/torch_dcp.py

Each checkpoint is a directory ``<save tag>-<step>`` with a file of each rank's parameters and
optimizer state; a world of another size loads it as well, and no other one writes there. Its part
that is written last, ``.metadata``, is there once all ranks have written theirs. The step that all
have committed is loaded; if none is on record, the newest whole one.
"""

from __future__ import annotations

import argparse
import os
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
        self.directory = directory
        self._net, self._optimizer = net, optimizer
        self._device = device

    def save(self, step: int) -> None:
        """Every rank writes its part; returns when all have."""
        net, optimizer = get_state_dict(self._net, self._optimizer)
        path = self._path(step, muster.save_tag())
        if dist.get_rank() == 0:  # one that is written again must not look whole meanwhile
            (path / ".metadata").unlink(missing_ok=True)
        dist.barrier()
        dcp.save({"net": net, "optimizer": optimizer}, checkpoint_id=path)
        if dist.get_rank() == 0:
            # Tags sort as worlds form: what a later world has saved stays.
            mine = sorted(found for found in self._whole() if found <= path)
            for older in mine[:-KEPT]:
                shutil.rmtree(older)

    def load(self) -> int:
        """Load the checkpoint that counts, the same for every rank; 0 if there is none."""
        # Rank 0's choice is everybody's: another rank may have looked a moment later.
        chosen = [self._newest() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(chosen, 0, device=self._device)
        path = chosen[0]
        if path is not None:
            net, optimizer = get_state_dict(self._net, self._optimizer)
            state = {"net": net, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=path)
            set_state_dict(
                self._net, self._optimizer, model_state_dict=net, optim_state_dict=optimizer
            )
        return step_of(path) if path is not None else 0

    def _newest(self) -> Path | None:
        committed = muster.last_commit()
        if committed is not None:  # by its name: a listing may be out of date
            path = self._path(committed, committed.tag)
            if (path / ".metadata").exists():
                return path
        return max(self._whole(), key=step_of, default=None)

    def _whole(self) -> list[Path]:
        return [path.parent for path in self.directory.glob("*/.metadata")]

    def _path(self, step: int, tag: str) -> Path:
        return self.directory / f"{tag}-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


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
    with muster.drain(start, checkpoints.directory) as drain:
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
