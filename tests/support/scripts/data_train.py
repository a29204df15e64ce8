# SPDX-License-Identifier: Apache-2.0
"""The training of ``data_loop.py`` by ``muster.train``, and its log.

    data_train.py KIND SAMPLES STEPS

``KIND``: ``ddp``, ``fsdp`` (each layer sharded by ``fully_shard``), ``accelerate``; or ``own``: the
sharded model in a loop of the script's own, saved by ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

import muster
from muster.data import ElasticSampler
from tests.support.training.sample_log import SampleLog

KIND, SAMPLES, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
BATCHES: dict[str, Any] = {"global_batch": 24, "micro_batch": 6}
SEED = 11
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "10"))
STEP_S = float(os.environ.get("STEP_S", "0.05"))
DIRECTORY = Path(os.environ["CHECKPOINT_DIR"])


def rows() -> list[Any]:
    given = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(SEED))
    return [(number, given[number], given[number].sin()) for number in range(SAMPLES)]


def net_of() -> nn.Sequential:
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    if KIND in ("fsdp", "own"):
        fully_shard(net[0])
        fully_shard(net)
    return net


def optimizer_of(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.05, momentum=0.9)


def by_muster_train() -> None:
    accelerator = Accelerator(cpu=True) if KIND == "accelerate" else None
    model: Any = net_of()
    optimizer: Any = optimizer_of(model)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    elif KIND == "ddp":
        model = DistributedDataParallel(model)
    with muster.train(
        *(model, optimizer, rows()),
        directory=DIRECTORY / KIND,
        epochs=STEPS,
        max_steps=STEPS,
        save_every=SAVE_EVERY,
        seed=SEED,
        accelerator=accelerator,
        **BATCHES,
    ) as training:
        log = SampleLog(training.steps)
        for numbers, given, wanted in training:
            loss = (model(given) - wanted).square().mean()
            log.add(numbers.tolist(), loss.item() * len(numbers))
            if training.step(loss):
                log.ends(training.steps)
                time.sleep(STEP_S)


def by_an_own_loop() -> None:
    net = net_of()
    assert isinstance(net, FSDPModule)
    optimizer = optimizer_of(net)
    sampler = ElasticSampler(SAMPLES, SEED, **BATCHES)
    last = muster.last_commit()
    step = 0 if last is None else int(last)
    if last is not None:
        model_state, state = get_state_dict(net, optimizer)
        dcp.load(
            {"net": model_state, "optimizer": state}, checkpoint_id=DIRECTORY / f"{last.tag}-{step}"
        )
        set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=state)
        sampler.go_to(last.cursor)
    log = SampleLog(step)
    loader = DataLoader(rows(), batch_sampler=sampler)
    with muster.drain(step, DIRECTORY) as drain:
        while step < STEPS:
            for (numbers, given, wanted), part in sampler.follow(loader):
                net.set_requires_gradient_sync(part.ends_step)
                loss = (net(given) - wanted).square().mean()
                (loss * part.weight).backward()
                log.add(numbers.tolist(), loss.item() * part.samples)
                if not part.ends_step:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                log.ends(step)
                if drain.commit_due(step) or step % SAVE_EVERY == 0 or step == STEPS:
                    model_state, state = get_state_dict(net, optimizer)
                    path = DIRECTORY / f"{muster.save_tag()}-{step}"
                    dcp.save({"net": model_state, "optimizer": state}, checkpoint_id=path)
                    drain.committed(step, cursor=sampler.cursor)
                if step == STEPS:
                    break
                time.sleep(STEP_S)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if KIND == "own":
        by_an_own_loop()
    else:
        by_muster_train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
