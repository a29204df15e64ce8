# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers on several nodes: one call in place of train(), and no step is lost.

    muster local --nodes 2 --event drain:rank0@world2+5s -- torchrun examples/transformers_gpt2.py

A GPT-2 of 30 thousand weights learns to count; nothing is downloaded.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import muster.transformers

STEPS = int(os.environ.get("STEPS", "400"))
STEP_S = 0.1  # there is time to watch; 0: full speed
WORDS, TEXTS = 64, 2048
BATCH, ON_ONE_RANK = 32, 8  # a batch is of all ranks together
CHECKPOINTS = os.path.join(os.environ.get("CHECKPOINT_DIR", "checkpoints"), "transformers_gpt2")


class Watched(TrainerCallback):
    """Says where training starts, and makes each step last for a while."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rank = f"rank {args.process_index} of {args.world_size}"
        print(f"{rank} starts at step {state.global_step}", flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(STEP_S)


def main() -> None:
    texts = [torch.arange(first, first + 16) % WORDS for first in range(TEXTS)]
    data = [{"input_ids": text, "labels": text} for text in texts]
    size = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=WORDS, bos_token_id=None, eos_token_id=None, **size)
    arguments = TrainingArguments(
        output_dir=CHECKPOINTS,  # every node reads and writes it
        max_steps=STEPS,  # of BATCH texts each, in a world of any size
        per_device_train_batch_size=ON_ONE_RANK,
        learning_rate=1e-2,
        save_steps=100,
        save_total_limit=2,
        use_cpu=True,  # leave it out where there are GPUs
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Watched()])
    result = muster.transformers.train(trainer, global_batch=BATCH)
    if arguments.process_index == 0:
        print(f"loss {result.training_loss:.5f} after {result.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
