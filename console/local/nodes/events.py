# SPDX-License-Identifier: Apache-2.0
"""The events of the simulated nodes and their times: ``--event ACTION[:NODE]@TIME``.

A time counts from the start, or, after ``worldN+``, from the first step of a world of N ranks: a
drill then takes the same course on a slow machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rdzv.errors import ConfigError
from rdzv.records.template import Sizes
from rdzv.sentences import counted

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

_UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_EVENT = re.compile(r"(?P<action>[a-z-]+)(?::(?P<target>[^@]*))?@(?P<time>.*)", re.DOTALL)
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh]?)", re.ASCII)
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
            f"--event {text!r}: no time {match['time']!r}; write a time as 15s, 2m or "
            "1h, or a time after a world's first step, as world3+5s"
        )
    at_s = float(time[1]) * _UNIT_S[time[2]]
    return Event(at_s, action, target, int(world[1]) if world else None)


def by_world(events: Iterable[Event]) -> list[list[Event]]:
    """Group the events that count from a world: consecutive ones of one size share one world."""
    counted = [event for event in events if event.world_size is not None]
    return [list(group) for _, group in groupby(counted, key=lambda event: event.world_size)]


@dataclass(frozen=True, slots=True)
class Reach:
    """The nodes and worlds that a run can have; its events must fit in.

    ``slots``: ranks per node. ``launcher``: a node of that name runs horovodrun.
    """

    nodes: int
    slots: int
    sizes: Sizes
    launcher: bool = False

    def faults(self, events: Sequence[Event]) -> Iterator[str]:
        """Yield a sentence for each event that can never fit."""
        for event in events:
            adds = [one for one in events if one.action == "add"]
            fault = self._world_fault(event, len(adds)) or self._target_fault(event, adds)
            if fault:
                yield f"--event {event}: {fault}"

    def _world_fault(self, event: Event, adds: int) -> str:
        if event.world_size is None:
            return ""
        none = f"no world of {event.world_size} ranks can form"
        most = min(self.nodes + adds, self.sizes.most)
        largest = self.sizes.largest(most) * self.slots
        if event.world_size > largest:
            return f"{none}: the largest has {largest}"
        if self.launcher:
            return ""  # horovodrun may leave slots of a node empty
        if event.world_size % self.slots:
            return f"{none}: a node has {self.slots}"
        size = event.world_size // self.slots
        if self.sizes.largest(size) != size:
            return f"{none}: the sizes are {self.sizes}"
        return ""

    def _target_fault(self, event: Event, adds: Sequence[Event]) -> str:
        if event.action == "add" or event.target is None:
            return ""
        if event.target == "launcher":
            return "" if self.launcher else "there is no launcher: torchrun runs on each node"
        if (rank := event.target_rank) is not None:
            most = min(self.nodes + len(adds), self.sizes.most)
            ranks = most * self.slots
            if rank < ranks:
                return ""
            each = counted(self.slots, "rank")
            have = f"{counted(most, 'node')} with {each} each: rank 0 to {ranks - 1}"
            return f"there is no rank {rank}; there are {have}"
        earlier = [add for add in adds if _may_precede(add, event)]
        if event.target in self._names(earlier):
            return ""
        early = " so early" if event.target in self._names(adds) else ""
        last = self.nodes + sum(add.target is None for add in earlier) - 1
        there = f"the nodes are node-0 to node-{last}" if last else "the only node is node-0"
        return f"there is no {event.target}{early}: {there}"

    def _names(self, adds: Sequence[Event]) -> set[str]:
        unnamed = sum(add.target is None for add in adds)
        names = {f"node-{index}" for index in range(self.nodes + unnamed)}
        return names | {add.target for add in adds if add.target is not None}


def _may_precede(one: Event, other: Event) -> bool:
    """Return whether ``one`` may happen before ``other``; by the clocks of worlds it always may."""
    if one.world_size is not None or other.world_size is not None:
        return True
    return one.at_s <= other.at_s
