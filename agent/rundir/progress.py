# SPDX-License-Identifier: Apache-2.0
"""The progress of this pod's ranks, as ``import muster`` writes it.

The lines come from the training container: whatever they contain may leave a rank unknown, but does
no more harm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher_shim.rundir.layout import read_untrusted
from launcher_shim.rundir.rank_reports import read_whole
from rdzv.errors import RecordError
from rdzv.records.codec import CURSOR_MAX_BYTES, take_samples, take_seconds, take_tag
from rdzv.records.progress import RankInWorld, RankProgress

CURSORS_MAX_BYTES = 16 * 1024
"""Bound on a file of cursors: far more than those of the steps that a rank names."""


def read_ranks(directory: Path) -> tuple[RankProgress, ...]:
    """Read what the ranks of a pod have published; skip a file that is no progress file.

    Whether a rank's process is still alive does not matter: one that is dead passes no step.
    """
    return tuple(_rank(directory, line) for line in read_lines(directory))


def read_cursors(directory: Path, line: RankProgress) -> dict[int, str]:
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


def _rank(directory: Path, line: RankProgress) -> RankProgress:
    if not line.gives_cursors:
        return line
    cursors = read_cursors(directory, line)
    # Omit a step without a cursor, although cursors are written before the line: a later line has
    # it.
    saved = tuple(step for step in line.saved if step in cursors)
    acked = None if line.acked is None or line.acked[1] not in cursors else line.acked
    at = tuple(cursors[step] for step in saved)
    return replace(line, acked=acked, saved=saved, cursors=at)


def read_lines(directory: Path) -> tuple[RankProgress, ...]:
    """Read every rank's line, by local rank, of any round and whether it is alive or not."""
    lines = (read_line(path) for path in directory.glob("*.json"))
    return tuple(sorted(filter(None, lines), key=lambda line: line.local_rank))


def read_line(path: Path) -> RankProgress | None:
    """Read one rank's line; return None if there is none that is whole."""
    content = read_whole(path)
    return None if content is None else _parse(content)


def is_gone(line: RankProgress) -> bool:
    """Return whether the process that wrote the line has ended, even if its PID was reused."""
    try:
        stat = Path(f"/proc/{line.pid}/stat").read_bytes()
        after_name = stat.rpartition(b")")[2].split()
        return after_name[0] in (b"Z", b"X") or int(after_name[19]) != line.started
    except (OSError, ValueError, IndexError):
        return True


def _parse(content: bytes) -> RankProgress | None:
    try:
        fields = json.loads(content)
        at_unix_s = float(fields["time"])
        if not math.isfinite(at_unix_s):
            return None
        numbers: dict[str, Any] = {name: int(fields[name]) for name in _NUMBERS}
        return RankProgress(
            **numbers,
            master=str(fields["master"]),
            at_unix_s=at_unix_s,
            drain=fields["drain"] is True,
            held=fields["held"] is True,
            acked=_pair(fields, "acked", int),
            failed=_pair(fields, "failed", str),
            away=fields.get("away") is True,
            saved=tuple(int(step) for step in fields.get("saved", ())),
            gives_cursors=fields.get("cursors") is True,
            saver=fields.get("saver") is True,
            answered=_pair({"answered": None, **fields}, "answered", int),
            page=fields.get("page") is True,
            tag=take_tag("progress", fields),
            save_s=take_seconds("progress", fields, "save_s") if "save_s" in fields else 0.0,
            samples=take_samples("progress", fields),
            waits=_share(fields.get("waits")),
            in_world=_in_world(fields["world"]) if "world" in fields else None,
        )
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError, RecordError):
        return None


def _in_world(part: Mapping[str, Any]) -> RankInWorld:
    counted = {name: int(part.get(name, 0)) for name in ("epoch", "held", "broken", "formed")}
    if min(counted.values()) < 0:
        raise ValueError("a negative number")
    return RankInWorld(
        **counted,
        number=int(part["number"]),
        step=int(part["step"]),
        failed=_pair({"failed": None, **part}, "failed", str),
        ready=part.get("ready") is True,
        over=part.get("over") is True,
        torch=str(part.get("torch", ""))[:TORCH_MAX],
    )


TORCH_MAX = 40
"""The longest name of a release of torch that is read."""

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


def _share(found: Any) -> float | None:
    share = -1.0 if found is None else float(found)
    return share if 0.0 <= share <= 1.0 else None


def _pair(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    if fields[name] is None:
        return None
    epoch, value = fields[name]
    return int(epoch), kind(value)
