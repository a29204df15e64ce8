# SPDX-License-Identifier: Apache-2.0
"""Training script of ``stuck``: its ranks come to stand still, or are slow without a fault.

The file ``fault.json`` of CONTROL has the ``kind``, the ``rank`` and the ``number`` of a fault,
which ends once ``released`` has that number. With CALM there is none: the first step compiles for a
minute, saves take half a minute, evaluations two minutes. Each rank writes its process and its step
into ``rank-RANK``.
"""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import muster

CONTROL = Path(os.environ["CONTROL"])
STEP_S = float(os.environ.get("STEP_S", "0.1"))
STEPS = int(os.environ.get("STEPS", "0"))
WORKERS = int(os.environ.get("WORKERS", "0"))
CALM = "CALM" in os.environ
COMPILE_S, SAVE_S, EVALUATE_S = 60.0, 35.0, 120.0
SAVE_STEPS = 1250
EVALUATED_BY_ONE, EVALUATED_BY_ALL, COMPILED_AGAIN = 4000, 6500, 8000
RANK = int(os.environ["RANK"])


class Fault:
    """The fault that the benchmark asks of one rank."""

    def __init__(self) -> None:
        try:
            asked = json.loads((CONTROL / "fault.json").read_text())
        except (OSError, ValueError):
            asked = {"kind": "", "rank": -1, "number": 0}
        self.kind, self.rank, self.number = (
            str(asked["kind"]),
            int(asked["rank"]),
            int(asked["number"]),
        )

    @property
    def lasts(self) -> bool:
        try:
            return int((CONTROL / "released").read_text()) < self.number
        except (OSError, ValueError):
            return self.number > 0

    def is_mine(self, kind: str) -> bool:
        return self.kind == kind and self.rank == RANK and self.lasts


def hold(lock: threading.Lock, fault: Fault) -> None:
    """Hold a lock while the fault lasts."""
    with lock:
        (CONTROL / f"held-{os.getpid()}").write_text("")
        while fault.lasts:
            time.sleep(0.1)


class Rows(Dataset[torch.Tensor]):  # type: ignore[misc]
    """Rows behind a lock, which another thread of the guilty rank does not give back."""

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        fault, lock = Fault(), threading.Lock()
        if fault.is_mine("loader"):
            held = CONTROL / f"held-{os.getpid()}"
            held.unlink(missing_ok=True)
            threading.Thread(target=hold, args=(lock, fault), daemon=True).start()
            while not held.exists():
                time.sleep(0.01)
        with lock:
            return torch.full((8,), 1.0)


def spin(fault: Fault) -> None:
    count = 0
    while count % 65536 or fault.lasts:
        count += 1


def read_shard(path: Path) -> str:
    """Read from a storage that does not answer."""
    return path.read_text()


def mean(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    dist.all_reduce(value, group=group)
    return value / dist.get_world_size(group)


def obey(fault: Fault, other: dist.ProcessGroup) -> None:
    """Carry out this rank's new fault, between two steps."""
    if fault.is_mine("loop"):
        spin(fault)
    elif fault.is_mine("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.is_mine("read"):
        path = CONTROL / f"shard-{fault.number}"
        os.mkfifo(path)
        read_shard(path)
    elif fault.is_mine("order"):
        dist.all_reduce(torch.ones(1), group=other)


def follow_order(other: dist.ProcessGroup) -> None:
    """Take part in the other group's operation of a guilty rank, once its fault has ended."""
    done = 0
    while True:
        time.sleep(0.1)
        fault = Fault()
        if fault.kind in ("order", "mean") and fault.number > done and not fault.lasts:
            done = fault.number
            if fault.rank != RANK:
                dist.all_reduce(torch.ones(1), group=other)


class SlowFile(io.BytesIO):
    """A file on a slow disk."""

    def write(self, content: Any) -> int:
        if not self.tell():
            time.sleep(SAVE_S)
        return super().write(content)


def evaluate(model: torch.nn.Module) -> None:
    until_s = time.monotonic() + EVALUATE_S
    with torch.no_grad():
        while time.monotonic() < until_s:
            model(torch.ones(1, 8)).sum()
            time.sleep(0.05)


def compiles_slowly(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    time.sleep(COMPILE_S)
    return graph.forward  # type: ignore[no-any-return]


def calm(step: int, model: DistributedDataParallel) -> int:
    """Save and evaluate as users do; return how many rows the next batch has."""
    if step % SAVE_STEPS == 0 and RANK == 0:
        torch.save(model.state_dict(), SlowFile())
    if step == EVALUATED_BY_ALL or (step == EVALUATED_BY_ONE and RANK == 0):
        evaluate(model.module)
    return 2 if step >= COMPILED_AGAIN else 1


def main() -> None:
    dist.init_process_group("gloo")
    other = dist.new_group(backend="gloo")
    net: torch.nn.Module = torch.nn.Linear(8, 8)
    if CALM:
        net = torch.compile(net, backend=compiles_slowly, dynamic=False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step, done, rows = 0, 0, 1
    threading.Thread(target=follow_order, args=(other,), daemon=True).start()
    with muster.drain(0) as drain, open(CONTROL / f"rank-{RANK}", "wb", buffering=0) as here:
        for batch in DataLoader(Rows(), batch_size=1, num_workers=WORKERS):
            fault = Fault()
            if fault.number > done:
                obey(fault, other)
            loss = model(batch.expand(rows, -1)).sum()
            loss.backward()
            if fault.number > done and fault.is_mine("mean"):
                mean(torch.ones(1), other)
            done = fault.number
            mean(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            os.pwrite(here.fileno(), b"%-10d %-10d" % (os.getpid(), step), 0)
            if drain.commit_due(step):
                drain.committed(step)
            if CALM:
                rows = calm(step, model)
            if step == STEPS:
                return
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
