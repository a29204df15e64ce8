# SPDX-License-Identifier: Apache-2.0
"""The cost of a sampler: samples per second, the first batch in the middle of 10⁹, and memory.

The baseline is torch's ``DistributedSampler`` over as many samples, in turns, each for one rank.
Times are processor time of this thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DistributedSampler

from benchmarks.figures import Bar, Figure, of_runs
from muster.data import ElasticSampler

SAMPLES = 10_000_000
MANY = 1_000_000_000
BATCH = 256
TURNS = 5
STARTS = 50


async def measure() -> list[Figure]:
    """Measure a whole epoch in worlds of one and of four; then starts, then memory."""
    return [_rate(world) for world in (1, 4)] + [_start(), _memory()]


def _rate(world: int) -> Figure:
    ours, torchs = [], []
    for turn in range(TURNS):
        sampler = ElasticSampler(SAMPLES, turn, global_batch=BATCH, rank=0, world_size=world)
        ours.append(_millions_a_second(sampler.ids(), SAMPLES // world))
        dataset: Any = range(SAMPLES)
        other: Any = DistributedSampler(dataset, num_replicas=world, rank=0, seed=turn)
        torchs.append(_millions_a_second(other, SAMPLES // world))
    name = f"data: samples of one rank of {world} a second, of {SAMPLES:,}"
    baseline = "torch's DistributedSampler"
    return of_runs(name, "M/s", Bar("ratio", ">=", 1.0), ours, torchs, baseline)


def _millions_a_second(samples: Iterable[Any], count: int) -> float:
    began_s = time.thread_time()
    deque(samples, maxlen=0)
    return count / (time.thread_time() - began_s) / 1e6


def _start() -> Figure:
    runs = []
    for turn in range(STARTS):
        began_s = time.perf_counter()
        sampler = ElasticSampler(MANY, turn, global_batch=BATCH, rank=0, world_size=4)
        sampler.go_to({"epoch": 3, "samples": MANY // 2, "of": MANY, "seed": turn})
        next(iter(sampler))
        runs.append((time.perf_counter() - began_s) * 1000)
    name = f"data: made, at a cursor in the middle of {MANY:,}, and the first batch; median"
    return of_runs(name, "ms", Bar("value", "<=", 10.0), runs)


def _memory() -> Figure:
    peaks = []
    for size in (SAMPLES, MANY):
        tracemalloc.start()
        sampler = ElasticSampler(size, global_batch=BATCH, rank=0, world_size=1)
        for at, _ in enumerate(sampler):
            if at == 2000:
                break
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    name, other = f"data: most memory of a sampler of {MANY:,} samples", f"one of {SAMPLES:,}"
    return of_runs(name, "MiB", Bar("ratio", "<=", 1.5), peaks[1:], peaks[:1], other)
