# SPDX-License-Identifier: Apache-2.0
"""The progress of this pod's ranks, as ``import muster`` writes it.

The lines come from the training container: whatever they contain may leave a rank unknown, but does
no more harm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_shim.rundir.progress_line import read_whole
from launcher_shim.rundir.safe_open import read_untrusted
from rdzv.drain.gate import RankProgress
from rdzv.errors import RecordError
from rdzv.records.codec import CURSOR_MAX_BYTES, take_samples, take_seconds, take_tag

CURSORS_MAX_BYTES = 16 * 1024
"""Bound on a file of cursors: far more than those of the steps that a rank names."""


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """One rank at one moment.

    ``started`` is in clock ticks since boot, ``at_unix_s`` the rank's wall clock. ``master`` names
    the rank's round. ``step`` is the boundary it came to last, -1 before the first. ``drain``: it
    looks at the gate at each boundary. ``held``: it waits there. ``away``: its loop has ended, and
    it may look at the gate again in the next. ``acked`` is the epoch and step of its newest
    acknowledgement, ``failed`` the epoch and reason of a failed save. ``saved`` are steps that it
    has saved, for whatever cause: the newest, and some before. ``cursors``: it gives data cursors
    with them, in a file beside the line. ``saver``: it saves when a Horovod launcher's drain asks
    for it; ``answered`` are the ask and the step of its newest save of that kind. ``page``: it
    reads the gate's page, where an older one has ``gate.json`` alone. ``tag``: the save tag that
    its script has asked for, empty for none. ``save_s``: seconds that its newest periodic save has
    taken since the boundary, 0.0 if it is unknown or short. ``samples``: whether
    its saves keep the samples, or why not; empty if it does not say.
    """

    pid: int
    started: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    restart: int
    master: str
    step: int
    at_unix_s: float
    drain: bool
    held: bool
    epoch: int
    acked: tuple[int, int] | None
    failed: tuple[int, str] | None
    away: bool = False
    saved: tuple[int, ...] = ()
    cursors: bool = False
    saver: bool = False
    answered: tuple[int, int] | None = None
    page: bool = False
    tag: str = ""
    save_s: float = 0.0
    samples: str = ""


def read_ranks(directory: Path) -> tuple[RankProgress, ...]:
    """Read what the ranks of a pod have published; skip a file that is no progress file.

    Whether a rank's process is still alive does not matter: one that is dead passes no step.
    """
    return tuple(_rank(directory, line) for line in read_lines(directory))


def read_cursors(directory: Path, line: ProgressLine) -> dict[int, str]:
    """Read the data cursors of the steps that the process of ``line`` has saved, by step."""
    try:
        content = read_untrusted(directory / f"{line.local_rank}.cursors", CURSORS_MAX_BYTES)
        fields = json.loads(content)
        if (fields["pid"], fields["started"]) != (line.pid, line.started):
            return {}
        found = {int(step): str(text) for step, text in fields["cursors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {step: text for step, text in found.items() if len(text) <= CURSOR_MAX_BYTES}


def _rank(directory: Path, line: ProgressLine) -> RankProgress:
    cursors = read_cursors(directory, line) if line.cursors else {}
    # Omit a step without a cursor, although cursors are written before the line: a later line has
    # it.
    saved = tuple(step for step in line.saved if step in cursors or not line.cursors)
    whole = line.acked is None or line.acked[1] in cursors or not line.cursors
    return RankProgress(
        local_rank=line.local_rank,
        local_world_size=line.local_world_size,
        master=line.master,
        step=line.step,
        drain=line.drain,
        held=line.held,
        acked=line.acked if whole else None,
        failed=line.failed,
        away=line.away,
        saved=saved,
        rank=line.rank,
        cursors=tuple(cursors[step] for step in saved) if line.cursors else (),
        saver=line.saver,
        answered=line.answered,
        page=line.page,
        tag=line.tag,
        save_s=line.save_s,
        samples=line.samples,
    )


def read_lines(directory: Path) -> tuple[ProgressLine, ...]:
    """Read every rank's line, by local rank, of any round and whether it is alive or not."""
    lines = (read_line(path) for path in directory.glob("*.json"))
    return tuple(sorted(filter(None, lines), key=lambda line: line.local_rank))


def read_line(path: Path) -> ProgressLine | None:
    """Read one rank's line; return None if there is none that is whole."""
    content = read_whole(path)
    return None if content is None else _parse(content)


def is_gone(line: ProgressLine) -> bool:
    """Return whether the process that wrote the line has ended, even if its PID was reused."""
    try:
        stat = Path(f"/proc/{line.pid}/stat").read_bytes()
        after_name = stat.rpartition(b")")[2].split()
        return after_name[0] in (b"Z", b"X") or int(after_name[19]) != line.started
    except (OSError, ValueError, IndexError):
        return True


def _parse(content: bytes) -> ProgressLine | None:
    try:
        fields = json.loads(content)
        at_unix_s = float(fields["time"])
        if not math.isfinite(at_unix_s):
            return None
        return ProgressLine(
            **{name: int(fields[name]) for name in _NUMBERS},
            master=str(fields["master"]),
            at_unix_s=at_unix_s,
            drain=fields["drain"] is True,
            held=fields["held"] is True,
            acked=_pair(fields, "acked", int),
            failed=_pair(fields, "failed", str),
            away=fields.get("away") is True,
            saved=tuple(int(step) for step in fields.get("saved", ())),
            cursors=fields.get("cursors") is True,
            saver=fields.get("saver") is True,
            answered=_pair({"answered": None, **fields}, "answered", int),
            page=fields.get("page") is True,
            tag=take_tag("progress", fields),
            save_s=take_seconds("progress", fields, "save_s") if "save_s" in fields else 0.0,
            samples=take_samples("progress", fields),
        )
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError, RecordError):
        return None


_NUMBERS = (
    "pid",
    "started",
    "rank",
    "local_rank",
    "world_size",
    "local_world_size",
    "restart",
    "step",
    "epoch",
)


def _pair(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    if fields[name] is None:
        return None
    epoch, value = fields[name]
    return int(epoch), kind(value)
