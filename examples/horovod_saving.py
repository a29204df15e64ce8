# SPDX-License-Identifier: Apache-2.0
"""Elastic Horovod with a checkpoint on disk: a launcher that is started again goes on from there.

    muster local --nodes 2 -- horovodrun python examples/horovod_saving.py

``state.commit()`` keeps the state in the workers' memory: enough for all that befalls workers, and
gone with the launcher. So rank 0 saves it on a disk that all pods share, every few seconds and
before the launcher has to go, and whoever starts anew begins with what is there.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState

import muster
import muster.horovod

DIRECTORY, KEPT = Path(os.environ.get("CHECKPOINT_DIR", ".")), 3


def found(tag: str = "*") -> list[Path]:
    """The checkpoints of one launcher, or of all; the newest step is the last."""
    return sorted(DIRECTORY.glob(f"horovod-*-{tag}.pt"))


def save(state: TorchState) -> None:
    """Write a checkpoint aside and rename it into place: a kill leaves no half of one."""
    tag = muster.save_tag()
    checkpoint = DIRECTORY / f"horovod-{state.step:08d}-{tag}.pt"
    nascent = checkpoint.with_suffix(".part")
    torch.save(
        {
            "model": state.model.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "step": state.step,
        },
        nascent,
    )
    nascent.replace(checkpoint)
    for old in found(tag)[:-KEPT]:
        old.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=50.0, help="a step takes at least this")
    parser.add_argument("--save-s", type=float, default=5.0, help="between two checkpoints")
    arguments = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=net.named_parameters())
    state = TorchState(model=net, optimizer=optimizer, step=0)
    if checkpoints := found():
        # All read it: the one that becomes rank 0 gives it to the others.
        saved = torch.load(checkpoints[-1])
        net.load_state_dict(saved["model"])
        sgd.load_state_dict(saved["optimizer"])
        state.step = saved["step"]
        state.save()

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: TorchState) -> None:
        print(f"rank {hvd.rank()} of {hvd.size()} goes on after step {state.step}", flush=True)
        saved_s = time.monotonic()
        while state.step < arguments.steps:
            inputs = torch.randn(16, 8)
            loss = (net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step += 1
            time.sleep(arguments.step_ms / 1000)
            due = time.monotonic() - saved_s >= arguments.save_s
            if muster.horovod.commit_due(state.step) or (hvd.rank() == 0 and due):
                save(state)
                muster.horovod.committed(state.step)
                saved_s = time.monotonic()
            state.commit()
        if hvd.rank() == 0:
            save(state)
            print(f"trained {state.step} steps", flush=True)

    train(state)


if __name__ == "__main__":
    main()
