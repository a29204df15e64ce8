# SPDX-License-Identifier: Apache-2.0
"""Reports of the training container in the run directory: its progress, launch and failures.

Ranks write by ``import muster`` and a hook, ``muster-run`` from ``launcher_shim.pod``: whatever the
files contain may leave something unknown, but does no more harm. Errors go to the store, where the
whole job's users read them: so what may be a secret is masked here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher_shim.pod.launch import REPORT_MAX_BYTES, TEXT_MAX
from launcher_shim.rundir import layout
from launcher_shim.rundir.layout import read_untrusted
from launcher_shim.rundir.rank_reports import FRAMES_MAX, StackFrame, read_whole
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import (
    CURSOR_MAX_BYTES,
    load_record,
    take,
    take_samples,
    take_seconds,
    take_tag,
)
from rdzv.records.progress import RankInWorld, RankProgress

CURSORS_MAX_BYTES = 16 * 1024
"""Bound on a file of cursors: far more than those of the steps that a rank names."""

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

STACKS_MAX_BYTES = 4 * 1024 * 1024

PLAIN_STARTS_MAX = 64
"""The most files to read: a pod has a worker for each of its devices."""

FAILURE_MAX_BYTES = 4096
FAILURES_READ_MAX = 256
"""The most files that are looked at: there is one for each local rank."""

MASK = "***"

_CREDENTIALS = re.compile(r"://[^\s/@]{1,200}@")
_QUERY = re.compile(r"(://[^\s?'\"]{1,200})\?[^\s'\")]{1,1000}")
_NAMED = re.compile(
    r"(?i)\b([a-z0-9_-]{0,40}(?:password|passwd|token|secret|api_?key|credential)s?['\"]?"
    r"\s{0,3}[=:]\s{0,3})[^\s,;&)]{1,400}"
)
_WORD = re.compile(r"[A-Za-z0-9_+-]{20,}")
_PREFIXES = ("hf_", "ghp_", "gho_", "github_pat_", "glpat-", "sk-", "xox", "AKIA", "ASIA", "eyJ")

_OF_ANOTHER = re.compile(r"(closed|reset) by peer|[Bb]roken pipe|remote process exited")


def read_ranks(directory: Path) -> tuple[RankProgress, ...]:
    """Read what the ranks of a pod have published; skip a file that is no progress file.

    Whether a rank's process is still alive does not matter: one that is dead passes no step.
    """
    return tuple(_rank(directory, line) for line in read_lines(directory))


def read_cursors(directory: Path, line: RankProgress) -> dict[int, str]:
    """Read the data cursors of the steps that the process of ``line`` has saved, by step.

    The lines come from the training container: whatever they contain may leave a rank unknown,
    but does no more harm.
    """
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
        fields = {"tag": "", "samples": "", **json.loads(content)}
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
            tag=take_tag("progress", fields, "tag"),
            save_s=take_seconds("progress", fields, "save_s") if "save_s" in fields else 0.0,
            samples=take_samples("progress", fields, "samples"),
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


def _share(found: Any) -> float | None:
    share = -1.0 if found is None else float(found)
    return share if 0.0 <= share <= 1.0 else None


def _pair(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    if fields[name] is None:
        return None
    epoch, value = fields[name]
    return int(epoch), kind(value)


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launcher, with the options and variables that it was given; empty for the others.

    ``started`` names the run of ``muster-run``, which is another one after each restart of the
    container. ``launcher`` is empty while the command has started none.

    The files come from the training container, from ``launcher_shim.pod``: whatever they
    contain may leave something unknown, but does no more harm.
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


@dataclass(frozen=True, slots=True)
class FailureReport:
    """One uncaught exception of a rank; ``at_boot_s`` is of the clock that all processes share.

    ``master`` names its round, as in ``LiveRound``. ``text`` is masked.
    """

    pid: int
    rank: int
    local_rank: int
    master: str
    kind: str
    text: str
    where: str
    at_boot_s: float

    @property
    def follows(self) -> bool:
        """Whether the end of another rank is its cause."""
        return _OF_ANOTHER.search(self.text) is not None


def read_failures(directory: Path) -> tuple[FailureReport, ...]:
    """Read what the ranks have reported, the earliest first; skip a file that is no report."""
    try:
        paths = sorted(directory.glob("*.json"))[:FAILURES_READ_MAX]
    except OSError:
        return ()
    found = [report for path in paths if (report := _read_failure(path)) is not None]
    return tuple(sorted(found, key=lambda report: report.at_boot_s))


def _read_failure(path: Path) -> FailureReport | None:
    try:
        fields = load_record(path.name, read_untrusted(path, FAILURE_MAX_BYTES))
        return FailureReport(
            pid=take(path.name, fields, "pid", int),
            rank=take(path.name, fields, "rank", int),
            local_rank=take(path.name, fields, "local_rank", int),
            master=take(path.name, fields, "master", str),
            kind=take(path.name, fields, "kind", str),
            text=masked(take(path.name, fields, "text", str)),
            where=take(path.name, fields, "where", str),
            at_boot_s=take_seconds(path.name, fields, "at_boot_s"),
        )
    except (OSError, RecordError):
        return None


def masked(text: str) -> str:
    """Return ``text`` without what looks like a credential.

    That is: the user in a URL and its query, the value after a name such as ``token=``, and a word
    that looks like a key.
    """
    text = _CREDENTIALS.sub(f"://{MASK}@", text)
    text = _QUERY.sub(rf"\1?{MASK}", text)
    text = _NAMED.sub(rf"\1{MASK}", text)
    return _WORD.sub(lambda word: MASK if _looks_secret(word[0]) else word[0], text)


def _looks_secret(word: str) -> bool:
    if word.startswith(_PREFIXES):
        return True
    digits = sum(c.isdigit() for c in word)
    if len(word) >= 32 and set(word.lower()) <= set("0123456789abcdef"):
        return True
    return digits >= 3 and any(c.islower() for c in word) and any(c.isupper() for c in word)
