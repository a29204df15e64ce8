# SPDX-License-Identifier: Apache-2.0
"""A rank that lives through changes of its world, as a process forked from one that has torch.

It trains plain DDP with a constant global batch, and writes what it has made to a log.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from muster.data import ElasticSampler
from muster.world import World
from tests.support.training.planted_worlds import PLANTS

ROWS, BATCH, PACE_S = 96, 12, 0.01


@dataclass(frozen=True)
class Case:
    """One rank's life. ``dies_at``: the step in whose backward pass it kills itself.

    ``dies_after``: the step after which it does, where the others wait in a callback for it.
    """

    name: str
    folder: Path
    dies_at: int = 0
    dies_after: int = 0
    dies_in_form: bool = False
    raises_in_form: bool = False
    raises_at: int = 0
    fails_like_gloo: bool = False
    norm: bool = False
    fed: bool = False
    planted: str = ""

    @property
    def run_dir(self) -> Path:
        return self.folder / self.name


class Model:
    """A net and all that trains it, from one seed."""

    def __init__(self, norm: bool) -> None:
        torch.manual_seed(0)
        middle: nn.Module = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(4, 16), middle, nn.Tanh(), nn.Linear(16, 2))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.schedule = StepLR(self.optimizer, 20, 0.9)
        rows = torch.Generator().manual_seed(7)
        self.rows = torch.randn(ROWS, 4, generator=rows)

    @property
    def parts(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule}

    def learn(self, called: Any, rows: torch.Tensor, share: float) -> None:
        loss = (called(rows) - rows.sin()[:, :2]).square().sum() * share / BATCH
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    @property
    def digest(self) -> str:
        """A digest of every bit that is handed over."""
        return digest_of(self.net, self.optimizer, self.schedule)


def digest_of(net: nn.Module, optimizer: Any, schedule: Any) -> str:
    """A digest of every bit of a model and of what trains it."""
    tensors = [*net.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [torch.as_tensor(one) for one in state.values()]
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    found.update(json.dumps(schedule.state_dict()["_last_lr"]).encode())
    return found.hexdigest()[:16]


def rows_of(step: int) -> list[int]:
    """The rows of a step's global batch, the same in every world."""
    order: list[int] = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step)).tolist()
    return order[:BATCH]


def undisturbed(steps: int) -> Iterator[list[torch.Tensor]]:
    """The weights of one process after each step."""
    torch.set_num_threads(1)
    model = Model(norm=False)
    for step in range(1, steps + 1):
        model.learn(model.net, model.rows[rows_of(step)], 1.0)
        yield [one.detach().clone() for one in model.net.parameters()]


def agree(case: Case, step: int) -> bool:
    """Return, on all ranks alike, whether the goal is reached: a collective of a callback."""
    if step == case.dies_after:
        os.kill(os.getpid(), signal.SIGKILL)
    ends = torch.tensor([float(step >= goal_of(case.folder))])
    dist.all_reduce(ends)
    return bool(ends)


class TrainerLog:
    """What a callback writes: the state in which each world begins, and each step."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._lines = (case.folder / f"{case.name}.jsonl").open("a", buffering=1)
        self._number = -1
        enter = World.__enter__

        def noted(world: World) -> World:
            self._world = world
            return enter(world)

        World.__enter__ = noted  # type: ignore[method-assign]

    def say(self, **fields: Any) -> None:
        self._lines.write(json.dumps(fields) + "\n")

    def begin(self, step: int, rank: int, digest: str) -> None:
        """Write with which step and state this rank's world begins."""
        self._number = self._world._me.formed
        self.say(world=self._number, at=step, digest=digest, rank=rank)

    def make(self, step: int, rows: list[int]) -> bool:
        """Write a step and the rows it was trained on; return whether it was the last one."""
        self.say(step=step, world=self._number, rows=rows, whole=True)
        rows.clear()
        time.sleep(PACE_S)
        return agree(self._case, step)


def goal_of(folder: Path) -> int:
    try:
        return int((folder / "goal").read_text())
    except FileNotFoundError:
        return sys.maxsize


def entered(case: Case) -> None:
    """Make this process a rank of its pod."""
    errors = os.open(case.folder / f"{case.name}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os.environ.update(
        MUSTER_RUN_DIR=str(case.run_dir), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)


def train(case: Case) -> None:
    """Train until the goal; end the process."""
    entered(case)
    if case.planted:
        PLANTS[case.planted]()
    with (case.folder / f"{case.name}.jsonl").open("a", buffering=1) as log:
        _train(case, log)


def _train(case: Case, log: Any) -> None:
    def say(**fields: Any) -> None:
        log.write(json.dumps(fields) + "\n")

    model = Model(case.norm)
    parts, feed = model.parts, None
    sampler = ElasticSampler(ROWS, 3, global_batch=BATCH, rank=0, world_size=1)
    if case.fed:
        parts["sampler"] = sampler
    if case.dies_in_form:
        _die_in_form()
    world = World("gloo", parts)
    if case.raises_in_form:
        _raise_in_form(world)
    join = world._join

    def tries(order: Any) -> None:
        say(tries=order.number)
        join(order)

    world._join = tries  # type: ignore[method-assign]
    with world:
        called, formed = world.replicate(model.net), -1
        if case.fed:
            loader = torch.utils.data.DataLoader(range(ROWS), batch_sampler=sampler)
            feed = world.feed(loader)
        while world.step < goal_of(case.folder):
            rows: list[int] = []
            with world.next_step() as step:
                number = world._me.formed
                if number != formed:
                    formed = number
                    say(world=number, at=world.step, digest=model.digest, rank=world.rank)
                if step == case.raises_at:
                    raise (RuntimeError if case.fails_like_gloo else ValueError)("gloo: own")
                if step == case.dies_at:
                    parameter = next(model.net.parameters())
                    parameter.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                if feed is None:
                    rows = rows_of(step)[world.rank :: world.size]
                else:
                    rows = [int(row) for batch, part in feed for row in batch[: part.samples]]
                model.learn(called, model.rows[rows], float(world.size))
                time.sleep(PACE_S)
            say(step=step, world=formed, rows=rows, whole=world.step == step)
    say(ended=world.step, digest=model.digest)
    torch.save([one.detach() for one in model.net.parameters()], case.folder / f"{case.name}.pt")
    os._exit(0)


def _raise_in_form(world: World) -> None:
    """Let the first form fail here, once it is among its peers."""
    take = world._take_state

    def raises(*_: Any) -> Any:
        world._take_state = take  # type: ignore[method-assign]
        raise RuntimeError("no state could be taken")

    world._take_state = raises  # type: ignore[assignment]


def _die_in_form() -> None:
    """Let this process die as it joins its first world, once it is among its peers there."""
    import torch.distributed as dist

    def dies(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    dist.__dict__["init_process_group"] = dies
