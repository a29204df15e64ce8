# SPDX-License-Identifier: Apache-2.0
"""Trains a small net with torch, and logs which samples each step trained and its loss.

    data_loop.py HOW SAMPLES STEPS

``HOW``: ``muster`` (``ElasticSampler``), or ``plain``: an epoch of ``DistributedSampler``, of whose
present world a new one skips as many batches as steps were made. Each process logs into a file of
its own below ``DATA_LOGS``. ``STOP_AFTER``: end at this step, as if the world had ended there.
``STATEFUL``: the loader is torchdata's, and rank 0's state of it is saved and loaded as well.
``SHARDS_RECORDS``: so many records are handed out in shards beside the samples, and logged there.
``GROWS``: so many rows come with each world, and every ``GROWS_EVERY`` steps of one; it ends after
two epochs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import muster
from muster.data import ElasticSampler, MicroBatch, shards
from muster.resuming import check_start
from tests.support.training.sample_log import SampleLog

HOW, SAMPLES, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
GLOBAL_BATCH, MICRO_BATCH, SEED = 24, 6, 11
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "10"))
STEP_S = float(os.environ.get("STEP_S", "0.05"))
STOP_AFTER = int(os.environ.get("STOP_AFTER", "0"))
STATEFUL = "STATEFUL" in os.environ
RECORDS = int(os.environ.get("SHARDS_RECORDS", "0"))
GROWS, GROWS_EVERY = int(os.environ.get("GROWS", "0")), 15
SHARD_SIZE, TAKEN = 3, 2
CHECKPOINT = Path(os.environ["CHECKPOINT_DIR"]) / f"data_{HOW}.pt"


class Rows(Dataset[Any]):  # type: ignore[misc]
    """Each row with its number."""

    def __init__(self, size: int = SAMPLES) -> None:
        most = SAMPLES + 100 * GROWS  # rows are the same ones whatever comes behind them
        given = torch.randn(most, 8, generator=torch.Generator().manual_seed(SEED))
        self.given = given[:size]
        self.wanted = self.given.sin()

    def __len__(self) -> int:
        return len(self.given)

    def grown(self) -> Rows:
        """These and ``GROWS`` more, which rank 0 notes for the next world."""
        more = Rows(len(self) + GROWS)
        if dist.get_rank() == 0:
            (CHECKPOINT.parent / "size").write_text(str(len(more)))
        return more

    @classmethod
    def of_this_world(cls) -> Rows:
        """Those that are there, and with ``GROWS`` more, as rank 0 finds them."""
        if not GROWS:
            return cls()
        size = [SAMPLES]
        if dist.get_rank() == 0 and (CHECKPOINT.parent / "size").exists():
            size = [int((CHECKPOINT.parent / "size").read_text())]
        dist.broadcast_object_list(size)
        return cls(size[0]).grown()

    def __getitem__(self, number: int) -> Any:
        return number, self.given[number], self.wanted[number]


def load(parts: dict[str, Any]) -> tuple[int, Any]:
    """Hand every rank what rank 0 finds, and the cursor of the last commit."""
    found: list[Any] = [{"step": 0, "cursor": None}, None]
    if dist.get_rank() == 0 and CHECKPOINT.exists():
        found[0] = torch.load(CHECKPOINT, weights_only=True)
    if dist.get_rank() == 0:
        last = muster.last_commit()
        found[1] = None if last is None else (int(last), last.cursor)
    dist.broadcast_object_list(found)
    saved, committed = found
    if committed is not None and committed[0] == saved["step"]:
        assert committed[1] == saved["cursor"], f"{committed} is not what is saved: {saved}"
    for name, part in parts.items():
        if name in saved:
            part.load_state_dict(saved[name])
    return check_start(saved["step"], CHECKPOINT.parent), saved["cursor"]


def save(step: int, cursor: Any, parts: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"step": step, "cursor": cursor, **saved}, CHECKPOINT.with_suffix(".part"))
        CHECKPOINT.with_suffix(".part").replace(CHECKPOINT)


def of_torch(rows: Rows, start: int) -> Iterator[tuple[Any, MicroBatch]]:
    """What torch's own sampler gives: the rest of an epoch by batches of the present world."""
    sampler: DistributedSampler[Any] = DistributedSampler(rows, seed=SEED)
    loader = DataLoader(rows, batch_size=MICRO_BATCH, sampler=sampler)
    for at, batch in enumerate(loader):
        if at >= start:
            yield batch, MicroBatch(0, len(batch[0]), 1.0, True)


def of_muster(sampler: ElasticSampler, loader: DataLoader[Any]) -> Iterator[tuple[Any, MicroBatch]]:
    while not GROWS:
        yield from sampler.follow(loader)
    made = 0
    while sampler.epoch < 2:
        for batch, part in sampler.follow(loader):
            yield batch, part
            made += part.ends_step
            if part.ends_step and made % GROWS_EVERY == 0:
                break
        else:
            continue
        rows = loader.dataset.grown()
        sampler.extend(len(rows))
        loader = DataLoader(rows, batch_sampler=sampler)


class Records:
    """Some records a step, from whoever hands them out; ``shard_history`` reads what it logs."""

    def __init__(self, start: int) -> None:
        self.shards = shards(RECORDS, shard_size=SHARD_SIZE, seed=SEED, start=start)
        member = os.environ["MUSTER_MEMBER"]
        path = Path(os.environ["DATA_LOGS"]) / f"{member}.{os.getpid()}.shards"
        self.log = path.open("a", buffering=1)
        self.log.write(f"begin {start} {time.time()} {os.environ['MASTER_PORT']}\n")

    def train(self, step: int) -> None:
        taken = self.shards.take(TAKEN)
        if taken:
            self.log.write(f"{step} {time.time():.3f} 0 {' '.join(map(str, taken))}\n")


def kind() -> Any:
    if STATEFUL:
        return import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return DataLoader


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    parts: dict[str, Any] = {"net": net, "optimizer": optimizer}
    rows = Rows.of_this_world()
    sampler = ElasticSampler(
        len(rows), SEED, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, grows=bool(GROWS)
    )
    workers = int(os.environ.get("WORKERS", "0"))
    loader: DataLoader[Any] = kind()(rows, batch_sampler=sampler, num_workers=workers)
    if STATEFUL:
        parts["loader"] = loader
    start, cursor = load(parts)
    sampler.go_to(cursor)
    batches = of_torch(rows, start) if HOW == "plain" else of_muster(sampler, loader)
    log = SampleLog(start)
    model = DistributedDataParallel(net)
    step = start
    with muster.drain() as drain:
        records = Records(start) if RECORDS else None
        for (numbers, given, wanted), part in batches:
            with nullcontext() if part.ends_step else model.no_sync():
                loss = (model(given) - wanted).square().mean()
                (loss * part.weight).backward()
            log.add(numbers.tolist() if part.samples else [], loss.item() * part.samples)
            if not part.ends_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if records is not None:
                records.train(step)
            log.ends(step)
            if drain.commit_due(step) or step % SAVE_EVERY == 0 or step in (STEPS, STOP_AFTER):
                where = sampler.cursor if HOW == "muster" else None
                save(step, where, parts)
                drain.committed(step, cursor=where)
            if step in (STEPS, STOP_AFTER):
                break
            time.sleep(STEP_S)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
