# SPDX-License-Identifier: Apache-2.0
"""Training whose ranks come to stand still as the file ``fault.json`` of CONTROL says.

It has ``kind``, ``rank`` and ``number``. The fault ends when ``released`` has the number.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import muster

CONTROL = Path(os.environ["CONTROL"])
STEP_S = float(os.environ.get("STEP_S", "0.02"))
RANK = int(os.environ["RANK"])


def fault() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((CONTROL / "fault.json").read_text())
    except (OSError, ValueError):
        return {"kind": "", "rank": -1, "number": 0}
    return found


def released() -> int:
    try:
        return int((CONTROL / "released").read_text())
    except (OSError, ValueError):
        return 0


class Numbers(Dataset[torch.Tensor]):  # type: ignore[misc]
    """Rows that a worker of the guilty rank does not return while the fault lasts."""

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        one = fault()
        while one["kind"] == "loader" and one["rank"] == RANK and released() < one["number"]:
            time.sleep(0.05)
        return torch.full((8,), 1.0)


def spin(number: int) -> None:
    count = 0
    while count % 4096 or released() < number:
        count += 1


def evaluate(number: int) -> None:
    with torch.no_grad():
        while released() < number:
            torch.ones(8).sum()
            time.sleep(0.01)


def save_checkpoint(number: int) -> None:
    while released() < number:
        time.sleep(0.05)


def obey(one: dict[str, Any], done: int, other: dist.ProcessGroup) -> int:
    """Carry out a fault that is new and this rank's; return its number."""
    number = int(one["number"])
    if number <= done or one["rank"] != RANK:
        return done
    if one["kind"] == "loop":
        spin(number)
    elif one["kind"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif one["kind"] == "order":
        dist.all_reduce(torch.ones(1), group=other)
    elif one["kind"] == "evaluation":
        evaluate(number)
    elif one["kind"] == "save":
        save_checkpoint(number)
    return number


def follow_order(other: dist.ProcessGroup) -> None:
    """Take part in the other group's operation of a guilty rank, once its fault may end."""
    done = 0
    while True:
        time.sleep(0.1)
        one = fault()
        number = int(one["number"])
        if one["kind"] == "order" and done < number <= released():
            done = number
            if one["rank"] != RANK:
                dist.all_reduce(torch.ones(1), group=other)


def batches() -> Iterator[torch.Tensor]:
    yield from DataLoader(Numbers(), batch_size=1, num_workers=1, prefetch_factor=2)


def main() -> None:
    dist.init_process_group("gloo")
    other = dist.new_group(backend="gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    done = step = 0
    threading.Thread(target=follow_order, args=(other,), daemon=True).start()
    with muster.drain(0) as drain:
        for batch in batches():
            step += 1
            time.sleep(STEP_S if step > 1 else float(os.environ.get("FIRST_S", "0")))
            done = obey(fault(), done, other)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            (CONTROL / f"pid-{RANK}").write_text(str(os.getpid()))
            if drain.commit_due(step):
                drain.committed(step)


if __name__ == "__main__":
    main()
