# SPDX-License-Identifier: Apache-2.0
"""The events of the simulated nodes and their times: ``--event ACTION[:NODE]@TIME``.

A time counts from the start, or, after ``worldN+``, from the first step of a world of N ranks: a
drill then takes the same course on a slow machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from rdzv.errors import ConfigError

ACTIONS = {
    "add": "start a node, empty; without a name under the lowest that is free",
    "drain": "the pod is deleted: notice and SIGTERM, SIGKILL after --grace; not replaced",
    "kill": "the whole node at once: sidecar, torchrun and workers (SIGKILL)",
    "kill-container": "torchrun and its workers at once; the container is restarted",
    "kill-launcher": "torchrun alone: its workers are orphans; the container is restarted",
    "kill-sidecar": "the sidecar alone (SIGKILL); it is started again",
    "stop": "freeze every process of the node (SIGSTOP)",
    "cont": "let a stopped node go on (SIGCONT)",
}

_UNIT_S = {"s": 1.0, "m": 60.0}
_EVENT = re.compile(r"(?P<action>[a-z-]+)(?::(?P<target>[^@]*))?@(?P<time>.*)", re.DOTALL)
_TIME = re.compile(r"(\d+(?:\.\d+)?)([sm])", re.ASCII)
_WORLD_TIME = re.compile(r"world([1-9]\d{0,4})(?:\+(\d.*))?", re.ASCII | re.DOTALL)
_TARGET = re.compile(r"node-(0|[1-9]\d{0,3})|rank(0|[1-9]\d{0,3})|launcher", re.ASCII)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a node.

    ``target`` is a node's name, ``rank<N>`` (the node that hosts it at that time), or None for add.
    ``at_s`` counts from the start of the run or, with a ``world_size`` in ranks, from the first
    step of a world of that size.
    """

    at_s: float
    action: str
    target: str | None
    world_size: int | None = None

    @property
    def target_rank(self) -> int | None:
        """The rank that the target names; None if it names a node."""
        if self.target is None or not self.target.startswith("rank"):
            return None
        return int(self.target.removeprefix("rank"))

    def __str__(self) -> str:
        target = f":{self.target}" if self.target else ""
        world = f"world{self.world_size}+" if self.world_size else ""
        return f"{self.action}{target}@{world}{self.at_s:g}s"


def read_event(text: str) -> Event:
    """Parse one ``--event``; raises ``ConfigError`` with one sentence."""
    match = _EVENT.fullmatch(text)
    if match is None:
        raise ConfigError(f"--event {text!r}: write ACTION:NODE@TIME, as in kill:node-1@15s")
    action, target = match["action"], match["target"]
    if action not in ACTIONS:
        raise ConfigError(f"--event {text!r}: no action {action!r}; there are {', '.join(ACTIONS)}")
    if target is None and action != "add":
        raise ConfigError(f"--event {text!r}: say which node, as in {action}:node-1@15s")
    if target is not None and not _TARGET.fullmatch(target):
        raise ConfigError(
            f"--event {text!r}: no node {target!r}; name it node-0, node-1, … or rank0"
        )
    if action == "add" and target is not None and not target.startswith("node"):
        raise ConfigError(f"--event {text!r}: a new node has no rank; name it node-0, node-1, …")
    world = _WORLD_TIME.fullmatch(match["time"])
    time = _TIME.fullmatch(match["time"] if world is None else world[2] or "0s")
    if time is None:
        raise ConfigError(
            f"--event {text!r}: no time {match['time']!r}; write seconds or minutes, as 15s or "
            "2m, or a time after a world's first step, as world3+5s"
        )
    at_s = float(time[1]) * _UNIT_S[time[2]]
    return Event(at_s, action, target, int(world[1]) if world else None)


def by_world(events: Iterable[Event]) -> list[list[Event]]:
    """Group the events that count from a world: consecutive ones of one size share one world."""
    counted = [event for event in events if event.world_size is not None]
    return [list(group) for _, group in groupby(counted, key=lambda event: event.world_size)]
