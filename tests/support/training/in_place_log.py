# SPDX-License-Identifier: Apache-2.0
"""What a trainer's rank logs in a job whose world changes in place: step lines, and samples.

The lines are those of ``step_loop.py``; the number of the world is the last field.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from muster.data import ElasticSampler

ROWS, BATCH, SEED = 240, 24, 11
STEP_S = float(os.environ.get("STEP_S", "0.1"))


class InPlaceLog:
    """Written by one rank."""

    def __init__(self) -> None:
        name = f"{os.environ['STEP_LOOP_NODE']}.{os.getpid()}"
        steps = Path(os.environ["STEP_LOOP_DIR"])
        samples = steps.parent / "samples"
        samples.mkdir(exist_ok=True)
        self._steps = (steps / name).open("a", buffering=1)
        self._samples = (samples / name).open("a", buffering=1)
        self._stop = Path(os.environ["STEP_LOOP_STOP"])
        self._world = -1
        self._taken: list[int] = []

    def begin(self) -> None:
        """A trainer begins in the world that the sidecar shows."""
        shown = json.loads((Path(os.environ["MUSTER_RUN_DIR"]) / "world").read_bytes())
        self._world = shown["number"]
        self._taken = []

    def take(self, samples: Iterable[int]) -> None:
        """A micro batch is trained."""
        self._taken += samples

    def ends(self, step: int) -> bool:
        """The optimizer step is made; return whether all ranks stop after it."""
        import torch
        import torch.distributed as dist

        rank, size = dist.get_rank(), dist.get_world_size()
        restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
        made = f"{time.monotonic()} {step} {rank} {size} {restarts} {os.getpid()} {self._world}\n"
        self._samples.write(json.dumps([step, self._world, size, self._taken]) + "\n")
        self._steps.write(made)
        self._taken = []
        time.sleep(STEP_S)
        stops = torch.tensor([int(self._stop.exists())])
        dist.all_reduce(stops)
        return bool(stops)


def assert_each_sample_once(directory: Path) -> None:
    """Each step has trained its own global batch, each sample of it once, in one world."""
    by_step: dict[int, dict[int, list[list[int]]]] = {}
    sizes: dict[int, int] = {}
    for path in (directory.parent / "samples").iterdir():
        whole, _, _ = path.read_text().rpartition("\n")
        for line in whole.splitlines():
            step, world, sizes[world], samples = json.loads(line)
            by_step.setdefault(step, {}).setdefault(world, []).append(samples)
    last = max(by_step)
    assert sorted(by_step) == list(range(1, last + 1))
    sampler = ElasticSampler(ROWS, SEED, global_batch=BATCH, rank=0, world_size=1)
    for step in range(1, last + 1):
        sampler.go_to(sampler.place_of(*divmod((step - 1) * BATCH, ROWS)))
        wanted = Counter(map(int, next(iter(sampler))))
        world = max(by_step[step])
        ranks = by_step[step][world]
        found = Counter(sample for samples in ranks for sample in samples)
        # A rank that is killed as a step ends has trained its part, and cannot say so.
        assert found == wanted if len(ranks) == sizes[world] else found <= wanted, f"step {step}"
