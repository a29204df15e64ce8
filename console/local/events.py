# SPDX-License-Identifier: Apache-2.0
"""What happens to the simulated nodes, and when: ``--event ACTION[:NODE]@TIME``."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
_TARGET = re.compile(r"node-(0|[1-9]\d{0,3})|rank(0|[1-9]\d{0,3})|launcher", re.ASCII)


@dataclass(frozen=True, slots=True)
class Event:
    """``target`` is a node's name, ``rank<N>`` (the node that hosts it then), or None for add."""

    at_s: float
    action: str
    target: str | None

    @property
    def target_rank(self) -> int | None:
        """The rank that the target names, or None where it names a node."""
        if self.target is None or not self.target.startswith("rank"):
            return None
        return int(self.target.removeprefix("rank"))

    def __str__(self) -> str:
        target = f":{self.target}" if self.target else ""
        return f"{self.action}{target}@{self.at_s:g}s"


def read_event(text: str) -> Event:
    """Read one ``--event``; raises ``ConfigError`` with one sentence."""
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
    time = _TIME.fullmatch(match["time"])
    if time is None:
        raise ConfigError(
            f"--event {text!r}: no time {match['time']!r}; write seconds or minutes, as 15s or 2m"
        )
    return Event(float(time[1]) * _UNIT_S[time[2]], action, target)
