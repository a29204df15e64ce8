# SPDX-License-Identifier: Apache-2.0
"""Training script of the Horovod benchmark: one allreduce and one commit per step.

Each step is a line in ``$BENCH_STEPS/<host>.<pid>``: monotonic seconds and world size.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch

STEP_S = 0.05


def train(state: hvd.elastic.TorchState) -> None:
    name = f"{os.environ['HOROVOD_HOSTNAME']}.{os.getpid()}"
    with open(Path(os.environ["BENCH_STEPS"], name), "a", buffering=1) as steps:
        while True:
            with torch.no_grad():
                state.model.weight += hvd.allreduce(torch.ones(1, 1), name="one")
            state.step += 1
            steps.write(f"{time.monotonic()} {hvd.size()}\n")
            time.sleep(STEP_S)
            state.commit()


def main() -> None:
    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    hvd.elastic.run(train)(hvd.elastic.TorchState(model=model, step=0))


if __name__ == "__main__":
    main()
