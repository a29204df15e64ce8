# SPDX-License-Identifier: Apache-2.0
"""The training of ``drain_loop.py``, as users of a library write it: a weight that counts down.

Argument: accelerate, deepspeed, lightning or transformers. The environment is that of
``drain_loop.py``: a line for each step, ``DRAIN_LOOP_ALL_EVERY``, ``DRAIN_LOOP_STEPS``,
``DRAIN_LOOP_ACCUMULATE`` (of Trainers), and the end when ``STEP_LOOP_STOP`` exists. A weight that
has not made each step once fails the training.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import muster
from muster.resuming import check_start

STEP_S = 0.05
STEPS = int(os.environ.get("DRAIN_LOOP_STEPS", "0"))
EVERY = int(os.environ["DRAIN_LOOP_ALL_EVERY"])
ACCUMULATE = int(os.environ.get("DRAIN_LOOP_ACCUMULATE", "1"))
DIRECTORY = Path(os.environ["CHECKPOINT_DIR"])
MANY = 100_000
"""Steps, where a library asks how many there are: the training is ended before."""


class Counter(nn.Module):
    """Its gradient is 1, so that with a learning rate of 1 the weight is minus the steps made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean()}


class Steps:
    """The lines of this rank; made by all ranks of a world at once."""

    def __init__(self) -> None:
        # Not of random, whose state is in a checkpoint of accelerate.
        world = torch.tensor([secrets.randbits(62)])
        self._alone = not dist.is_initialized()  # as Lightning leaves it to one rank
        if not self._alone:
            dist.broadcast(world, 0)
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        self._rest = (rank, size, 0, os.getpid(), int(world))
        name = f"{os.environ['STEP_LOOP_NODE']}.{os.getpid()}"
        self._file = open(Path(os.environ["STEP_LOOP_DIR"]) / name, "a", buffering=1)  # noqa: SIM115

    def made(self, step: int, weight: torch.Tensor) -> bool:
        """Write the line of a step; return whether all ranks end here."""
        if -weight.item() != step:
            raise RuntimeError(f"step {step} has the weight {weight.item()}")
        wishes = torch.tensor([int(Path(os.environ["STEP_LOOP_STOP"]).exists())])
        if not self._alone:
            dist.all_reduce(wishes)
        print(time.monotonic(), step, *self._rest, file=self._file)
        time.sleep(STEP_S)
        return bool(int(wishes)) or step == STEPS


def by_hand(
    step_of: Callable[[], torch.Tensor], save: Callable[[str], Any], load: Callable[[str], Any]
) -> None:
    """Train in a loop of the script's own; the callables make a step, save and load."""
    step, found = 0, muster.last_commit()
    if found is not None and (DIRECTORY / f"{found.tag}-{found}").exists():
        load(f"{found.tag}-{found}")
        step = int(found)
    check_start(step, DIRECTORY)
    steps, last = Steps(), False
    with muster.drain() as drain:
        while not last:
            weight = step_of()
            step += 1
            last = steps.made(step, weight)
            if drain.commit_due(step) or step % EVERY == 0:
                save(f"{muster.save_tag()}-{step}")
                drain.committed(step)
    dist.barrier()
    dist.destroy_process_group()


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Counter()
    net, sgd = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))

    def step() -> torch.Tensor:
        sgd.zero_grad()
        accelerator.backward(net(torch.ones(1))["loss"])
        sgd.step()
        return accelerator.unwrap_model(net).weight

    by_hand(
        step,
        lambda name: accelerator.save_state(str(DIRECTORY / name)),
        lambda name: accelerator.load_state(str(DIRECTORY / name)),
    )


def deepspeed() -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    net = Counter()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        config={"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0},
        dist_init_required=False,
    )

    def step() -> torch.Tensor:
        engine.backward(engine(torch.ones(1))["loss"])
        engine.step()
        return net.weight

    by_hand(
        step,
        lambda name: engine.save_checkpoint(str(DIRECTORY), tag=name),
        lambda name: engine.load_checkpoint(str(DIRECTORY), tag=name),
    )


def lightning() -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from muster.lightning import MusterCallback, last_checkpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Counter()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    class Lines(Callback):
        steps: Steps | None = None

        def on_train_batch_end(
            self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if (batch_idx + 1) % ACCUMULATE:
                return
            self.steps = self.steps or Steps()
            if self.steps.made(trainer.global_step, module.net.weight):
                trainer.should_stop = True

    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        max_steps=MANY,
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[
            Lines(),
            MusterCallback(str(DIRECTORY), steps_only=True),
            ModelCheckpoint(str(DIRECTORY), every_n_train_steps=EVERY, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = DataLoader([torch.ones(1)] * MANY)
    trainer.fit(Module(), data, ckpt_path=last_checkpoint(str(DIRECTORY)))


def transformers() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from muster.transformers import MusterCallback, last_checkpoint

    class Lines(TrainerCallback):
        steps: Steps | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.steps = self.steps or Steps()
            weight = getattr(named["model"], "module", named["model"]).weight
            if self.steps.made(state.global_step, weight):
                control.should_training_stop = True

    arguments = TrainingArguments(
        output_dir=str(DIRECTORY),
        max_steps=MANY,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        save_strategy="steps",
        save_steps=EVERY,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    data = [{"x": torch.ones(1)}] * MANY
    trainer = Trainer(
        Counter(),
        arguments,
        train_dataset=data,
        callbacks=[Lines(), MusterCallback(steps_only=True)],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(str(DIRECTORY)))


if __name__ == "__main__":
    trainers = (accelerate, deepspeed, lightning, transformers)
    {trainer.__name__: trainer for trainer in trainers}[sys.argv[1]]()
