# SPDX-License-Identifier: Apache-2.0
"""Which samples each step trained, in the history that the final weights contain.

A line for each step that a rank has made: when its world began, the world, the rank, the step where
it began, the step, the sum of its losses, and the samples. Where a world was rolled back, the later
one's steps are in the weights, and those of the one before are not.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class SampleLog:
    """Written by one rank."""

    def __init__(self, start: int) -> None:
        directory = Path(os.environ["DATA_LOGS"])
        directory.mkdir(parents=True, exist_ok=True)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._file = (directory / f"{os.getpid()}-{time.time_ns()}.{restarts}.log").open("a")
        self._began_s, self._start = time.time(), start
        self._samples: list[int] = []
        self._loss = 0.0

    def add(self, samples: Iterable[int], loss: float) -> None:
        """A micro batch was trained."""
        self._samples += samples
        self._loss += loss

    def ends(self, step: int) -> None:
        """The optimizer step is made; told before anything else may happen."""
        world = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        size = int(os.environ.get("WORLD_SIZE", "1"))
        fields = [self._began_s, world, size, self._start, step, self._loss, self._samples]
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()
        self._samples, self._loss = [], 0.0
        _fail_once(step)


def _fail_once(step: int) -> None:
    """Die after this step where ``FAILS`` says so, as in ``1@6 0@12``: rank 1 after step 6."""
    fails = f"{os.environ.get('RANK')}@{step}"
    if fails in os.environ.get("FAILS", "").split():
        mark = Path(os.environ["DATA_LOGS"], f"failed-{fails}")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Step:
    """One step of the final history: all its ranks together."""

    world: int
    loss: float
    samples: Sequence[int]


@dataclass(frozen=True)
class Account:
    """What the final weights have been trained on. ``again``: steps made once more after a loss."""

    steps: Sequence[Step]
    worlds: Sequence[int]
    again: int

    def of_epoch(self, epoch: int, per_epoch: int) -> Counter[int]:
        """How often each sample was trained in an epoch of so many steps."""
        steps = self.steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        return Counter(sample for step in steps for sample in step.samples)


def restart_counts(directory: Path) -> list[set[int]]:
    """The counts of restarts that the ranks of each world have."""
    counts: dict[str, set[int]] = {}
    for path in directory.glob("*.log"):
        for line in path.read_text().splitlines()[:1]:
            counts.setdefault(json.loads(line)[1], set()).add(int(path.suffixes[0][1:]))
    return list(counts.values())


def account(directory: Path) -> Account:
    """Read the logs of all ranks; raises ``AssertionError`` where a step or a rank is missing."""
    worlds: dict[str, dict[int, list[tuple[float, list[int]]]]] = {}
    began: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for path in directory.glob("*.log"):
        for line in path.read_text().splitlines():
            at_s, world, size, _, step, loss, samples = json.loads(line)
            began[world] = min(at_s, began.get(world, at_s))
            sizes[world] = size
            worlds.setdefault(world, {}).setdefault(step, []).append((loss, samples))
    ordered = sorted(worlds, key=lambda world: began[world])
    final: dict[int, str] = {}
    made = 0
    for world in ordered:
        for step in [step for step in final if step >= min(worlds[world])]:
            del final[step]  # rolled back
        whole = [step for step, ranks in worlds[world].items() if len(ranks) == sizes[world]]
        made += len(whole)
        final.update(dict.fromkeys(whole, world))
    assert sorted(final) == list(range(1, len(final) + 1)), "steps are missing"
    steps = []
    for step in sorted(final):
        world = final[step]
        ranks = worlds[world][step]
        samples = [one for _, some in ranks for one in some]
        loss = sum(loss for loss, _ in ranks) / max(1, len(samples))
        steps.append(Step(sizes[world], loss, samples))
    return Account(steps, [sizes[world] for world in ordered], made - len(final))
