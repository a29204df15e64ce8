# SPDX-License-Identifier: Apache-2.0
"""A Horovod training script that trains shards and logs what, as ``shards_loop.py`` does.

Each step is committed. A process outlives its world, so that it has a log for each.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from uuid import uuid4

import horovod.torch as hvd
import torch

import muster
import muster.data

RECORDS = int(os.environ["SHARDS_RECORDS"])
RECORD_S = float(os.environ.get("SHARDS_RECORD_S", "0.005"))
BATCH = 10
LATE = os.environ.get("SHARDS_LATE", "nobody")
LATE_STEPS, LATE_S = 15, 1.0
"""The node that tells late what its first steps contain, so that a kill comes before that."""
DIRECTORY = Path(os.environ["CHECKPOINT_DIR"])


def train(state: hvd.elastic.TorchState) -> None:
    world = hvd.broadcast_object(uuid4().hex, root_rank=0)
    member = os.environ["HOROVOD_HOSTNAME"]
    with open(DIRECTORY / f"{member}.{os.getpid()}.{world}.shards", "a", buffering=1) as log:
        log.write(f"begin {state.step} {time.time()} {world}\n")
        shards = muster.data.shards(
            RECORDS, shard_size=20, seed=7, start=state.step, world=world, ranks=hvd.size()
        )
        ended = False
        while not ended:
            batch = shards.take(BATCH)
            time.sleep(RECORD_S * len(batch))
            told = hvd.allreduce(torch.tensor([shards.done * 1.0]), op=hvd.Sum, name="done")
            ended = round(told.item()) == hvd.size()
            state.step += 1
            if batch:
                log.write(f"{state.step} {time.time():.3f} 0 {' '.join(map(str, batch))}\n")
            muster.report_step(state.step, hvd.rank(), hvd.size())
            if member.startswith(LATE) and state.step < LATE_STEPS:
                time.sleep(LATE_S)
            shards.committed(state.step)
            if not ended:
                hvd.barrier()
                state.commit()


def main() -> None:
    hvd.init()
    model = torch.nn.Linear(1, 1)
    hvd.elastic.run(train)(hvd.elastic.TorchState(model=model, step=0))


if __name__ == "__main__":
    main()
