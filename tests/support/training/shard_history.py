# SPDX-License-Identifier: Apache-2.0
"""What the final weights of ``shards_loop.py`` contain, by the logs of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class RankLog:
    """One process: the step it began from, when, in which world, and what it trained in a step."""

    node: str
    start: int
    began_unix_s: float
    world: str
    ended_unix_s: float = 0.0
    trained: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Step, epoch, records."""
    first_unix_s: float = 0.0
    """When it began to take records."""
    last_unix_s: float = 0.0
    """When it had trained the last of them."""


def read_log(path: Path) -> RankLog:
    lines = [line.split() for line in path.read_text().splitlines(keepends=True) if "\n" in line]
    _, start, began, world = lines[0]
    log = RankLog(path.name.partition(".")[0], int(start), float(began), world)
    for first, *rest in lines[1:]:
        if first == "epoch":
            log.first_unix_s = log.first_unix_s or float(rest[0])
        elif first == "end":
            log.ended_unix_s = float(rest[1])
        else:
            log.last_unix_s = float(rest[0])
            epoch, *records = (int(word) for word in rest[1:])
            log.trained.append((int(first), epoch, records))
    return log


def worlds(directory: Path) -> list[list[RankLog]]:
    """The logs of each world, in the order in which the worlds began."""
    by_world: dict[str, list[RankLog]] = {}
    for path in directory.glob("*.shards"):
        log = read_log(path)
        by_world.setdefault(log.world, []).append(log)
    return sorted(by_world.values(), key=lambda logs: min(log.began_unix_s for log in logs))


def surviving(directory: Path) -> Iterator[tuple[int, int]]:
    """Epoch and record of all that was trained up to the step that no later world began before."""
    until = float("inf")
    for logs in reversed(worlds(directory)):
        for log in logs:
            for step, epoch, records in log.trained:
                if step <= until:
                    yield from ((epoch, record) for record in records)
        until = min(until, *(log.start for log in logs))


def repeated_and_lost(
    directory: Path, size: int, epochs: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Epochs and records that were trained more than once, and those that never were."""
    seen = Counter(surviving(directory))
    wanted = Counter((epoch, record) for epoch in range(epochs) for record in range(size))
    return sorted(seen - wanted), sorted(wanted - seen)


def records_by_node(directory: Path) -> Counter[str]:
    """How many records each node has trained, also those that count no more."""
    counted: Counter[str] = Counter()
    for log in (log for logs in worlds(directory) for log in logs):
        counted[log.node] += sum(len(records) for _, _, records in log.trained)
    return counted
