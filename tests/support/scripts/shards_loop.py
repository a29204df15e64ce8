# SPDX-License-Identifier: Apache-2.0
"""A training script that trains shards, at another pace on each node, and logs what it trained.

A step lasts a set time: each rank trains as many records in it as it can. What the last step of the
script contains is in the log of all ranks; ``tests.support.training.shard_history`` reads it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import muster
import muster.data
from muster.resuming import check_start

RECORDS = int(os.environ["SHARDS_RECORDS"])
EPOCHS = int(os.environ.get("SHARDS_EPOCHS", "1"))
SHARD = int(os.environ.get("SHARDS_SIZE", "20"))
RECORD_S = float(os.environ.get("SHARDS_RECORD_S", "0.002"))
"""What one record takes; five times that on ``SHARDS_SLOW``."""
SLICE_S = float(os.environ.get("SHARDS_SLICE_S", "0.1"))
EVERY = int(os.environ.get("SHARDS_SAVE_EVERY", "10"))
BATCH = int(os.environ.get("SHARDS_BATCH", "5"))
SLOW = os.environ.get("SHARDS_SLOW", "")
DIRECTORY = Path(os.environ["CHECKPOINT_DIR"])


class Training:
    """One rank from its beginning to its end."""

    def __init__(self) -> None:
        member = os.environ.get("MUSTER_MEMBER", "alone")
        self.record_s = RECORD_S * (5 if member == SLOW else 1)
        self.step = muster.last_commit() or 0
        check_start(self.step, DIRECTORY)
        name = f"{member}.{os.getpid()}.shards"
        self.log = open(DIRECTORY / name, "a", buffering=1)  # noqa: SIM115
        self.log.write(f"begin {self.step} {time.time()} {os.environ['MASTER_PORT']}\n")

    def slice(self, shards: muster.data.Shards) -> list[int]:
        """Train for as long as a step lasts, or until there is nothing to train."""
        trained: list[int] = []
        done_s = time.monotonic()
        end_s = done_s + SLICE_S
        while time.monotonic() < end_s:
            batch = shards.take(BATCH)
            if not batch:
                break
            done_s = max(done_s, time.monotonic()) + self.record_s * len(batch)
            time.sleep(max(0.0, done_s - time.monotonic()))
            trained += batch
        return trained

    def epoch(self, epoch: int, drain: muster.Drain) -> None:
        self.log.write(f"epoch {time.time():.3f}\n")
        shards = muster.data.shards(RECORDS, shard_size=SHARD, epoch=epoch, seed=7, start=self.step)
        while True:
            trained = self.slice(shards)
            told = torch.tensor([len(trained), shards.done])
            dist.all_reduce(told)
            self.step += 1
            if trained:
                records = " ".join(map(str, trained))
                self.log.write(f"{self.step} {time.time():.3f} {epoch} {records}\n")
            if drain.commit_due(self.step) or self.step % EVERY == 0:
                drain.committed(self.step)
            if told[1] == dist.get_world_size():
                return


def main() -> None:
    dist.init_process_group("gloo")
    training = Training()
    with muster.drain() as drain:
        for epoch in range(EPOCHS):
            training.epoch(epoch, drain)
    training.log.write(f"end {training.step} {time.time()}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
