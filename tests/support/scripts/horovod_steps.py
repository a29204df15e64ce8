# SPDX-License-Identifier: Apache-2.0
"""A Horovod training script for drills: each applied step adds exactly 1 to the one weight.

A line for each step that was applied, in ``$STEPS_DIR/<host>.<pid>``: monotonic time, rank, size,
step and weight. Where ``$GATES_DIR/<host>`` exists, the process waits for it to vanish before it
joins, as one does whose imports take long. ``$GATES_DIR/<host>.waits`` tells that it does, and
``<host>.joined`` that it has joined. Rank 0 saves when the launcher has to go, and whoever starts
anew goes on from there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import muster.horovod

STEP_S = 0.05

HOST = os.environ["HOROVOD_HOSTNAME"]
SAVED = Path(os.environ["STEPS_DIR"]).with_name("saved")


def wait_at_the_gate() -> None:
    gate = Path(os.environ["GATES_DIR"], HOST)
    while gate.exists():
        gate.with_name(f"{HOST}.waits").touch()
        time.sleep(0.02)


def train(state: hvd.elastic.TorchState) -> None:
    with open(Path(os.environ["STEPS_DIR"], f"{HOST}.{os.getpid()}"), "a", buffering=1) as steps:
        while True:
            with torch.no_grad():
                state.model.weight += hvd.allreduce(torch.ones(1, 1), name="one")
            state.step += 1
            weight = state.model.weight.item()
            steps.write(f"{time.monotonic()} {hvd.rank()} {hvd.size()} {state.step} {weight:g}\n")
            time.sleep(STEP_S)
            if muster.horovod.commit_due(state.step):
                SAVED.with_suffix(".part").write_text(str(state.step))
                SAVED.with_suffix(".part").replace(SAVED)
                muster.horovod.committed(state.step)
            state.commit()


def main() -> None:
    wait_at_the_gate()
    hvd.init()
    Path(os.environ["GATES_DIR"], f"{HOST}.joined").touch()
    model = torch.nn.Linear(1, 1, bias=False)
    step = int(SAVED.read_text()) if SAVED.exists() else 0
    torch.nn.init.constant_(model.weight, step)
    hvd.elastic.run(train)(hvd.elastic.TorchState(model=model, step=step))


if __name__ == "__main__":
    main()
