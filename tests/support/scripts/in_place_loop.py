# SPDX-License-Identifier: Apache-2.0
"""DDP training in a world that changes in place, whose every step can be accounted for.

Each step is a line in a file of this process: moment, step, rank, size, number of the world, loss
of the whole batch, checksum of all state, resident KiB, descriptors. The loss of step N is that of
the state before it, so it depends on all steps up to there. It ends, with all ranks at one step, if
``STEP_LOOP_STOP`` exists. Without a sidecar it is the undisturbed run.
"""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import muster
from muster.world import World

ROWS, BATCH = 4096, 60  # a batch of all ranks together, for worlds of 1 to 6 ranks
STEP_S = float(os.environ.get("IN_PLACE_STEP_S", "0.05"))
WIDTH = int(os.environ.get("IN_PLACE_WIDTH", "32"))


def rows_of(step: int, rank: int, size: int) -> torch.Tensor:
    """This rank's rows of a step."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))
    return order[:BATCH][rank::size]


def used() -> tuple[int, int]:
    """Resident KiB, and descriptors, of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4, len(os.listdir("/proc/self/fd"))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, 8)
    wanted = inputs.sin() + inputs.roll(1, 1)
    net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    parts = {"net": net, "optimizer": optimizer}
    last = int(os.environ.get("IN_PLACE_STEPS", "0"))
    stop = Path(os.environ.get("STEP_LOOP_STOP", "/nonexistent"))
    saves = Path(os.environ["CHECKPOINT_DIR"])
    saves.mkdir(parents=True, exist_ok=True)
    start = 0
    found = max(saves.glob("*.pt"), key=lambda one: one.name, default=None)
    if found is not None:
        loaded = torch.load(found, weights_only=True)
        start = loaded["step"]
        for name, part in parts.items():
            part.load_state_dict(loaded[name])

    def save(step: int) -> None:
        if world.rank == 0:
            path = saves / f"{muster.save_tag()}-{step:08d}.pt"
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step, **state}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)

    def checksum() -> int:
        found = 0
        for parameter in net.parameters():
            state = optimizer.state[parameter]
            for one in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
                found = zlib.crc32(one.numpy().tobytes(), found)
        return found

    name = f"{os.environ.get('STEP_LOOP_NODE', 'alone')}.{os.getpid()}"
    ends = False
    with (
        open(Path(os.environ["IN_PLACE_DIR"]) / name, "a", buffering=1) as lines,
        World("gloo", parts, step=start, save=save) as world,
    ):
        model = world.replicate(net)
        while not ends:
            loss, wishes = torch.zeros(()), torch.zeros(())
            with world.next_step() as step:
                mine = rows_of(step, world.rank, world.size)
                # The ranks' gradients are averaged: this weight makes that the mean of the batch.
                part = (model(inputs[mine]) - wanted[mine]).square().sum() / (BATCH * 8)
                told = torch.tensor([part.item(), float(world.rank == 0 and stop.exists())])
                dist.all_reduce(told)
                loss, wishes = told
                optimizer.zero_grad()
                (part * world.size).backward()
                optimizer.step()
            if world.step != step:
                continue  # it broke, and did not count
            ends = bool(wishes) or world.step == last
            number = world._me.number if world.in_place else 0
            lines.write(
                f"{time.monotonic()} {step} {world.rank} {world.size} {number} {loss.item():.9f}"
                f" {checksum()} {used()[0]} {used()[1]}\n"
            )
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
