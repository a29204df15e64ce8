# SPDX-License-Identifier: Apache-2.0
"""A rank with a Trainer of transformers that lives through changes of its world."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import muster.transformers
from tests.support.training.survivor import BATCH, ROWS, Case, TrainerLog, digest_of, entered

MAX_STEPS = 200


class Net(nn.Module):
    """Notes which rows it was trained on."""

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        torch.manual_seed(os.getpid())  # only a handed state makes two ranks alike
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
        self.rows: list[int] = []
        self.step = 0
        self._dies_at = dies_at

    def forward(self, number: Any, given: Any) -> dict[str, Any]:
        self.rows += number.tolist()
        loss = (self.net(given) - given.sin()[:, :2]).square().mean()
        if self.step + 1 == self._dies_at:
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return {"loss": loss}


class Log(TrainerLog, TrainerCallback):
    """Writes each step, and the state in which each world begins."""

    def __init__(self, case: Case, net: Net) -> None:
        super().__init__(case)
        self.net = net

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.net.rows.clear()
        self.net.step = state.global_step
        digest = digest_of(given["model"], given["optimizer"], given["lr_scheduler"])
        self.begin(state.global_step, args.process_index, digest)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.net.step = state.global_step
        control.should_training_stop |= self.make(state.global_step, self.net.rows)


def train(case: Case) -> None:
    """Train until the goal; end the process."""
    entered(case)
    log = Log(case, net := Net(case.dies_at))
    arguments = TrainingArguments(
        str(case.folder / "checkpoints"), max_steps=MAX_STEPS, per_device_train_batch_size=4,
        learning_rate=1e-2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        logging_steps=5, remove_unused_columns=False, seed=3,
    )  # fmt: skip
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(7))
    data = [{"number": number, "given": row} for number, row in enumerate(rows)]
    trainer = Trainer(net, arguments, train_dataset=data, callbacks=[log])
    result = muster.transformers.train(trainer, global_batch=BATCH, in_place=True)
    digest = digest_of(net, trainer.optimizer, trainer.lr_scheduler)
    log.say(ended=result.global_step, digest=digest)
    os._exit(0)
