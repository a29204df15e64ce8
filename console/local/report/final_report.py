# SPDX-License-Identifier: Apache-2.0
"""The last output of a training script, without its launcher's lines on itself and the failure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 64 * 1024

_TORCHRUN_LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d|\[[IWE]\d{3} \d\d:\d\d:\d\d|\*{20,}")
_SCRIPT_FAILED = re.compile(r"E\d{4} .*\] failed \(exitcode: ")
_BLAMES_SCRIPT = "ChildFailedError"
_HOROVOD_WORKER_LINE = re.compile(r".*\[\d+\]<std(out|err)>:")


def last_words(lines: Sequence[str], count: int) -> list[str]:
    """Return the last ``count`` lines, oldest first.

    If torchrun ended because the script failed, these are the script's lines before that; if
    torchrun failed by itself, its own. horovodrun marks its workers' lines; without any such line,
    all output is its own.
    """
    if workers := [line for line in lines if _HOROVOD_WORKER_LINE.match(line)]:
        return workers[-count:]
    end = len(lines)
    if any(line.rstrip(": ").endswith(_BLAMES_SCRIPT) for line in lines):
        failures = [i for i, line in enumerate(lines) if _SCRIPT_FAILED.match(line)]
        end = failures[-1] if failures else end
    spoken = [line for line in lines[:end] if line.strip() and not _TORCHRUN_LINE.match(line)]
    return spoken[-count:]


def read_last_words(log: Path, count: int) -> list[str]:
    """Read the last words from a log file's last ``MAX_BYTES``; empty if there is no file."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - MAX_BYTES))
        return last_words(file.read().decode(errors="replace").splitlines(), count)
