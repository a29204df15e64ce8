# SPDX-License-Identifier: Apache-2.0
"""The reports of ``muster-run``: its launcher, plain starts of workers, and stacks of ranks.

The files come from the training container, from ``launcher_shim.pod``: whatever they contain may
leave something unknown, but does no more harm.
"""

from __future__ import annotations

from pathlib import Path

from launcher_shim.pod.launch import REPORT_MAX_BYTES, TEXT_MAX
from launcher_shim.rundir import layout
from launcher_shim.rundir.layout import read_untrusted
from launcher_shim.rundir.rank_reports import FRAMES_MAX, StackFrame
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import load_record, take

STACKS_MAX_BYTES = 4 * 1024 * 1024

PLAIN_STARTS_MAX = 64
"""The most files to read: a pod has a worker for each of its devices."""


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launcher, with the options and variables that it was given; empty for the others.

    ``started`` names the run of ``muster-run``, which is another one after each restart of the
    container. ``launcher`` is empty while the command has started none.
    """

    started: str
    launcher: str = ""
    pid: int = 0
    nnodes: str = ""
    rdzv_endpoint: str = ""
    rdzv_backend: str = ""
    standalone: bool = False


def read_launch(run_dir: Path) -> LaunchReport | None:
    """Read the report; return None if there is none, or if it is malformed."""
    try:
        content = read_untrusted(run_dir / layout.LAUNCH / layout.LAUNCHER, REPORT_MAX_BYTES)
    except OSError:
        return None
    try:
        fields = load_record(layout.LAUNCHER, content)
        return LaunchReport(
            started=take(layout.LAUNCHER, fields, "started", str)[:TEXT_MAX],
            launcher=take(layout.LAUNCHER, fields, "launcher", str)[:TEXT_MAX],
            pid=take(layout.LAUNCHER, fields, "pid", int),
            nnodes=_text(fields.get("nnodes")),
            rdzv_endpoint=_text(fields.get("rdzv_endpoint")),
            rdzv_backend=_text(fields.get("rdzv_backend")),
            standalone=_text(fields.get("standalone")) not in ("", "0", "false", "False"),
        )
    except RecordError:
        return None


def read_plain_starts(run_dir: Path) -> tuple[str, ...]:
    """Read why workers started without the zygote, by local rank; skip what cannot be read."""
    reasons = []
    try:
        paths = sorted((run_dir / layout.PLAIN_STARTS).iterdir())[:PLAIN_STARTS_MAX]
    except OSError:
        return ()
    for path in paths:
        try:
            content = read_untrusted(path, REPORT_MAX_BYTES)
        except OSError:
            continue
        reasons.append(_text(content.decode("utf-8", errors="replace")))
    return tuple(filter(None, reasons))


def _text(value: object) -> str:
    """Return ``value`` as one line of printable characters for a log; empty if it is no text."""
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() else "?" for c in value[:TEXT_MAX])


def read_stacks(run_dir: Path, ask: str) -> dict[int, tuple[str, list[StackFrame]]] | None:
    """Read the answer to ``ask``: state and stack by process; None if there is none yet."""
    try:
        content = read_untrusted(run_dir / layout.LAUNCH / layout.STACKS, STACKS_MAX_BYTES)
        fields = load_record(layout.STACKS, content)
        if fields["ask"] != ask:
            return None
        return {
            int(one["pid"]): (str(one["state"]), [_frame(*f) for f in one["frames"][:FRAMES_MAX]])
            for one in fields["ranks"]
        }
    except (OSError, RecordError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _frame(path: str, line: int, function: str) -> StackFrame:
    return StackFrame(str(path), int(line), str(function))
