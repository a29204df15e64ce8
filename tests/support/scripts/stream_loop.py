# SPDX-License-Identifier: Apache-2.0
"""Trains a stream of shards whose lengths nobody knows, and logs what each step trained.

    stream_loop.py KIND WORKERS EPOCHS

``KIND``: ``streamed``, the data set of the tests, or ``datasets``, that of Hugging Face. Each
checkpoint is a folder; ``tests.support.training.shard_history`` reads the logs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import muster
from muster.data import elastic_stream
from tests.support.training.streamed import Streamed

KIND, WORKERS, EPOCHS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
LENGTHS = [17, 40, 3, 29, 0, 55, 21, 34, 8, 46]
SIZE = sum(LENGTHS)
BATCH, EVERY = 2, 5
STEP_S = float(os.environ.get("STEP_S", "0.3"))
DIRECTORY = Path(os.environ["CHECKPOINT_DIR"])


def rows() -> Any:
    if KIND == "streamed":
        return Streamed(LENGTHS)
    kind = import_module("datasets").IterableDataset

    def numbers(shards: list[int]) -> Any:
        for shard in shards:
            for record in range(LENGTHS[shard]):
                yield {"shard": shard, "record": record}

    return kind.from_generator(numbers, gen_kwargs={"shards": [*range(len(LENGTHS))]})


def numbers_of(records: list[Any]) -> list[int]:
    pairs = [one if isinstance(one, tuple) else (one["shard"], one["record"]) for one in records]
    return [sum(LENGTHS[:shard]) + record for shard, record in pairs]


def main() -> None:
    dist.init_process_group("gloo")
    last = muster.last_commit()
    folder = None if last is None else DIRECTORY / f"{last.tag}-{last}"
    step = start = 0 if folder is None else json.loads((folder / "step.json").read_text())
    stream = elastic_stream(rows(), batch_size=BATCH, seed=7, lanes=2, collate=numbers_of)
    stream.load(folder, None if last is None else last.cursor)
    loader = DataLoader(stream, batch_size=None, num_workers=WORKERS)
    member = os.environ.get("MUSTER_MEMBER", "alone")
    log = (DIRECTORY / f"{member}.{os.getpid()}.shards").open("a", buffering=1)
    log.write(f"begin {start} {time.time()} {os.environ['MASTER_PORT']}\n")
    with muster.drain() as drain:
        while stream.epoch < EPOCHS:
            for batch in stream.follow(loader):
                told = torch.tensor([len(batch), stream.done])
                dist.all_reduce(told)
                step += 1
                if len(batch):
                    log.write(
                        f"{step} {time.time():.3f} {stream.epoch} {' '.join(map(str, batch))}\n"
                    )
                if told[1] == dist.get_world_size():
                    stream.end_epoch()
                if drain.commit_due(step) or step % EVERY == 0:
                    folder = DIRECTORY / f"{muster.save_tag()}-{step}"
                    cursor = stream.save(folder, step)
                    if dist.get_rank() == 0:
                        (folder / "step.json").write_text(str(step))
                    dist.barrier()
                    drain.committed(step, cursor=cursor)
                time.sleep(STEP_S)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
