# SPDX-License-Identifier: Apache-2.0
"""A training script for drills of draining: one all_reduce a step, saved where a drain asks so.

It writes the step lines that ``step_loop.py`` writes, and beside them, to ``saves``, a line for a
save: monotonic time, step, rank, world size, restart count, pid, master. Every rank keeps one
number that grows by one a step: its model. It ends, with all ranks at the same step, when
``STEP_LOOP_STOP`` exists, or after ``DRAIN_LOOP_STEPS`` (0: never).

From the environment: ``CHECKPOINT_DIR``, shared by all nodes; ``DRAIN_LOOP_STEP_S`` (0.05);
``DRAIN_LOOP_SAVE_S`` (0), what a save takes; ``DRAIN_LOOP_GATE``, a file: while it is there, each
save waits before that; ``DRAIN_LOOP_ACCUMULATE`` (1) batches to a step; ``DRAIN_LOOP_EVERY`` (0:
never), rank 0's periodic checkpoint, which is not told of; ``DRAIN_LOOP_ALL_EVERY`` (0: never),
that of all ranks, which is; ``DRAIN_LOOP_FAIL_SAVE`` (``STEP:RANK``): the first save of this rank
from this step on raises; ``DRAIN_LOOP_CATCH`` (0): it is caught, and training goes on;
``DRAIN_LOOP_TAG`` (0): the save tag is in the names of checkpoints; ``DRAIN_LOOP_LATE``, a
directory: the last rank begins once ``begin`` is in it, and makes ``waits``; ``DRAIN_LOOP_PRINT``
(0: never), the steps between two lines that each rank prints.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import muster
from muster.resuming import check_start

STEPS = int(os.environ.get("DRAIN_LOOP_STEPS", "0"))
STEP_S = float(os.environ.get("DRAIN_LOOP_STEP_S", "0.05"))
SAVE_S = float(os.environ.get("DRAIN_LOOP_SAVE_S", "0"))
GATE = os.environ.get("DRAIN_LOOP_GATE", "")
ACCUMULATE = int(os.environ.get("DRAIN_LOOP_ACCUMULATE", "1"))
CATCH = bool(int(os.environ.get("DRAIN_LOOP_CATCH", "0")))
EVERY = int(os.environ.get("DRAIN_LOOP_EVERY", "0"))
ALL_EVERY = int(os.environ.get("DRAIN_LOOP_ALL_EVERY", "0"))
TAGGED = bool(int(os.environ.get("DRAIN_LOOP_TAG", "0")))
PRINT = int(os.environ.get("DRAIN_LOOP_PRINT", "0"))
LATE = os.environ.get("DRAIN_LOOP_LATE", "")
FAIL_STEP, _, FAIL_RANK = os.environ.get("DRAIN_LOOP_FAIL_SAVE", "-1:-1").partition(":")


class Checkpoints:
    """Files of all ranks in one directory: ``<step>.<rank>.json``, and rank 0's periodic one.

    With tags: ``<save tag>.<step>.<rank>.json``.
    """

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self._directory = directory
        self._rank, self._size = rank, size
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, step: int, model: int) -> None:
        path = self._directory / name
        aside = path.with_suffix(f".{self._rank}.{os.getpid()}.tmp")
        saved = {"step": step, "model": model, "size": self._size, "pid": os.getpid()}
        aside.write_text(json.dumps(saved))
        aside.replace(path)

    def commit(self, step: int, model: int) -> None:
        while os.path.exists(GATE):
            time.sleep(0.02)
        time.sleep(SAVE_S)
        failed = self._directory / "failed"
        if 0 <= int(FAIL_STEP) <= step and self._rank == int(FAIL_RANK) and not failed.exists():
            failed.touch()
            raise OSError(28, "No space left on device")
        self.save(self.name_of(step, self._rank), step, model)

    def name_of(self, step: int, rank: int, tag: str = "") -> str:
        if TAGGED:
            return f"{tag or muster.save_tag()}.{step}.{rank}.json"
        return f"{step}.{rank}.json"

    def resume(self) -> tuple[int, int]:
        """Step and model to go on from: the last commit, or a periodic checkpoint that is newer."""
        found = (0, 0)
        committed = muster.last_commit()
        tag = committed.tag if committed is not None and TAGGED else ""
        if committed is not None and (self._directory / self.name_of(committed, 0, tag)).exists():
            found = self._load(self.name_of(committed, 0, tag))
            for rank in range(found[1]):
                assert self._load(self.name_of(committed, rank, tag))[0] == committed
            found = (committed, committed)
        if (self._directory / "periodic.json").exists():
            found = max(found, self._load("periodic.json", whole=True))
        check_start(found[0], self._directory)
        return found

    def _load(self, name: str, *, whole: bool = False) -> tuple[int, int]:
        saved = json.loads((self._directory / name).read_text())
        assert saved["step"] == saved["model"], "the model has not made each step once"
        return saved["step"], saved["model"] if whole else saved["size"]


def agreed(number: int) -> int:
    """The number, if all ranks have the same."""
    both = torch.tensor([number, -number])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    assert int(both[0]) == -int(both[1]), f"{number} here, up to {int(both[0])} elsewhere"
    return number


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    world = torch.tensor([random.getrandbits(62)])
    dist.broadcast(world, 0)
    stop = Path(os.environ["STEP_LOOP_STOP"])
    node, directory = os.environ["STEP_LOOP_NODE"], Path(os.environ["STEP_LOOP_DIR"])
    (directory.parent / "saves").mkdir(exist_ok=True)
    checkpoints = Checkpoints(Path(os.environ["CHECKPOINT_DIR"]), rank, size)
    step, model = checkpoints.resume()
    agreed(step)
    if LATE and rank == size - 1:
        (Path(LATE) / "waits").touch()
        while not (Path(LATE) / "begin").exists():
            time.sleep(0.02)
    name = f"{node}.{os.getpid()}"
    with (
        open(directory / name, "a", buffering=1) as steps,
        open(directory.parent / "saves" / name, "a", buffering=1) as saves,
        muster.drain() as drain,
    ):
        next_s = time.monotonic()
        while True:
            for _ in range(ACCUMULATE):
                wishes = torch.tensor([1, int(rank == 0 and stop.exists())])
                dist.all_reduce(wishes)
                if int(wishes[0]) != size:
                    raise RuntimeError(f"summed {int(wishes[0])} ranks in a world of {size}")
            step, model = step + 1, model + 1
            now_s = time.monotonic()
            steps.write(f"{now_s} {step} {rank} {size} {restarts} {os.getpid()} {int(world)}\n")
            if PRINT and step % PRINT == 0:
                sys.stdout.write(f"rank {rank} of {size} at step {step}\n")
                sys.stdout.flush()
            if drain.commit_due(step):
                try:
                    checkpoints.commit(step, model)
                except OSError as error:
                    if not CATCH:
                        raise
                    drain.failed(step, str(error))
                else:
                    at_s = time.monotonic()
                    saves.write(f"{at_s} {step} {rank} {size} {restarts} {os.getpid()} {master}\n")
                    drain.committed(step)
            if ALL_EVERY and step % ALL_EVERY == 0:
                checkpoints.save(checkpoints.name_of(step, rank), step, model)
                drain.committed(step)
            if EVERY and rank == 0 and step % EVERY == 0:
                checkpoints.save("periodic.json", step, model)
            if int(wishes[1]) or step == STEPS:
                break
            next_s = max(next_s + STEP_S, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
