# SPDX-License-Identifier: Apache-2.0
"""The one table of a job's states: what each means, and how bad it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from launcher_shim.pod.launchers import CENTRAL
from rdzv.dataclass import dataclass

Level = Literal["ok", "note", "warning", "fault"]
"""The levels of what is found, the best first."""

State = Literal[
    "starting",
    "below min",
    "gathering",
    "training",
    "saving",
    "draining",
    "finishing",
    "paused",
    "failing",
    "stuck",
    "done",
]
"""The states of a job; ``STATES`` explains them."""

Check = Literal[
    "store",
    "members",
    "launchers",
    "rounds",
    "steps",
    "saves",
    "pause",
    "quarantine",
    "drains",
    "clocks",
]
"""The questions of ``muster doctor`` and of ``docs/stuck.md``, in the order in which to ask them:
an answer is worth little before those above it are in order."""


StateEvent = Literal[
    "Starting", "BelowMin", "Gathering", "Training", "Paused", "Failing", "Stuck", "Done"
]
"""The Kubernetes Events about a job's state. They are an interface."""


@dataclass(frozen=True, slots=True)
class StateMeaning:
    """One row of the table: level, question that it belongs to, Event, and meaning."""

    level: Level
    check: Check
    event: StateEvent
    meaning: str


STATES: Mapping[State, StateMeaning] = {
    "starting": StateMeaning(
        "note",
        "launchers",
        "Starting",
        "its launchers start: no torchrun has asked for a world, no rank of a"
        f" {CENTRAL.name} reported",
    ),
    "below min": StateMeaning("warning", "members", "BelowMin", "fewer than min pods can train"),
    "gathering": StateMeaning("note", "launchers", "Gathering", "a world is about to form"),
    "training": StateMeaning("ok", "steps", "Training", "a world trains"),
    "saving": StateMeaning(
        "ok", "saves", "Training", "all ranks save, for a world of another size"
    ),
    "draining": StateMeaning("ok", "drains", "Training", "all ranks save, for a pod that leaves"),
    "finishing": StateMeaning("ok", "rounds", "Training", "the first ranks have ended well"),
    "paused": StateMeaning("note", "pause", "Paused", "no world forms until muster resume"),
    "failing": StateMeaning(
        "fault", "rounds", "Failing", "a worker ends world after world by a failure"
    ),
    "stuck": StateMeaning("fault", "steps", "Stuck", "ranks made steps, and make none any more"),
    "done": StateMeaning("ok", "rounds", "Done", "training has ended well"),
}
"""The one table of a job's states. The words are the same wherever a state is shown."""
