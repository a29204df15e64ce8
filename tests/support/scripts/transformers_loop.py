# SPDX-License-Identifier: Apache-2.0
"""A script as a user of transformers has one: a weight that counts down by one an optimizer step.

Arguments: output directory, log, steps in all. The log is given the weight after each optimizer
step.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from muster.transformers import MusterCallback, last_checkpoint

SAVE_STEPS = int(os.environ.get("SAVE_STEPS", "0"))


class Counter(nn.Module):
    def __init__(self, batch_s: float) -> None:
        super().__init__()
        self.batch_s = batch_s
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(self.batch_s)
        return {"loss": (self.weight * x).mean()}


class Log(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weight = kwargs["model"].weight
        with open(sys.argv[2], "a") as log:
            log.write(f"{-weight.item():.0f}\n")


def main() -> None:
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=int(sys.argv[3]),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        save_strategy="steps" if SAVE_STEPS else "no",
        save_steps=SAVE_STEPS or 1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    data = [{"x": torch.ones(1)} for _ in range(1000)]
    last = last_checkpoint(sys.argv[1])
    # Who trains from the beginning is told to save at steps that are still to come.
    counter = Counter(0.1 if last is None else 0.01)
    trainer = Trainer(
        counter, arguments, train_dataset=data, callbacks=[Log(), MusterCallback(steps_only=True)]
    )
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
