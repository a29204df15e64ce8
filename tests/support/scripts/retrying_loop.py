# SPDX-License-Identifier: Apache-2.0
"""A script whose first training runs out of memory, and which trains again with another trainer.

Arguments: output directory, "with" where the first callback is entered. It says "first" after the
first one has raised, and goes on once its standard input has a line.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from muster.transformers import MusterCallback


class Model(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.steps:
            raise MemoryError("played")
        self.steps -= 1
        return {"loss": (self.weight * x).mean()}


def train(model: Model, callback: MusterCallback) -> None:
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=3,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    data = [{"x": torch.ones(1)} for _ in range(8)]
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()


def main() -> None:
    callback = MusterCallback(steps_only=True)
    try:
        with callback if sys.argv[2] == "with" else nullcontext():
            train(Model(2), callback)
    except MemoryError:
        sys.stdout.write("first\n")
        sys.stdout.flush()
    sys.stdin.readline()
    train(Model(3), MusterCallback(steps_only=True))
    sys.stdout.write("second\n")


if __name__ == "__main__":
    main()
