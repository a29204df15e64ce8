# SPDX-License-Identifier: Apache-2.0
"""Trains a small net with the Trainer of transformers, and logs which samples each step trained.

    data_transformers.py HOW SAMPLES STEPS

``HOW``: ``muster`` (the callback sees to the data), or ``plain``: an epoch of the trainer's own.
``STOP_AFTER``: end at this step, as if the world had ended there.
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
from tests.support.training.sample_log import SampleLog

HOW, SAMPLES, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
GLOBAL_BATCH, MICRO_BATCH, SEED = 24, 6, 11
STEP_S = float(os.environ.get("STEP_S", "0"))
STOP_AFTER = int(os.environ.get("STOP_AFTER", "0"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.log: SampleLog | None = None

    def forward(self, number: Any, given: Any, wanted: Any) -> dict[str, Any]:
        loss = (self.net(given) - wanted).square().mean()
        if self.log is not None:
            self.log.add(number.tolist(), loss.item() * len(number))
        return {"loss": loss}


class Log(TrainerCallback):
    def __init__(self, net: Net) -> None:
        self.net = net

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.net.log = SampleLog(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.net.log is not None
        self.net.log.ends(state.global_step)
        time.sleep(STEP_S)
        if state.global_step == STOP_AFTER:
            control.should_save = control.should_training_stop = True


def main() -> None:
    torch.set_num_threads(1)
    given = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(SEED))
    data = [
        {"number": number, "given": row, "wanted": row.sin()} for number, row in enumerate(given)
    ]
    output = os.path.join(os.environ["CHECKPOINT_DIR"], f"transformers_{HOW}")
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=MICRO_BATCH,
        num_train_epochs=1 if HOW == "plain" else STEPS / -(-SAMPLES // GLOBAL_BATCH),
        learning_rate=0.05,
        lr_scheduler_type="linear",
        optim="sgd",
        max_grad_norm=0,
        save_steps=int(os.environ.get("SAVE_EVERY", "10")),
        save_total_limit=2,
        seed=SEED,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
    )
    net = Net()
    trainer = Trainer(net, arguments, train_dataset=data, callbacks=[Log(net)])
    if HOW == "plain":
        trainer.add_callback(MusterCallback(steps_only=True))
    else:
        MusterCallback(trainer, global_batch=GLOBAL_BATCH)
    trainer.train(resume_from_checkpoint=last_checkpoint(output))


if __name__ == "__main__":
    main()
