# SPDX-License-Identifier: Apache-2.0
"""Training script of a benchmark whose world changes in place; the lines are ``training.py``'s.

``$BENCH_STATE_BYTES`` is the size of a frozen tensor in its state, besides a small net.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.training import STEP_S
from muster.world import World


def main() -> None:
    torch.set_num_threads(1)
    net = nn.Linear(8, 8)
    ballast = nn.ParameterList(
        [nn.Parameter(torch.ones(int(os.environ.get("BENCH_STATE_BYTES", "0")) // 4), False)]
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    path = Path(os.environ["BENCH_STEPS"], str(os.getpid()))
    parts = {"net": net, "optimizer": optimizer, "ballast": ballast}
    with open(path, "a", buffering=1) as steps, World("gloo", parts) as world:
        model = world.replicate(net)
        while True:
            with world.next_step() as step:
                optimizer.zero_grad()
                model(torch.ones(4, 8)).square().sum().backward()
                optimizer.step()
            if world.step == step:
                steps.write(f"{time.monotonic()} {world.rank} {world.size} {step}\n")
                time.sleep(STEP_S)


if __name__ == "__main__":
    main()
