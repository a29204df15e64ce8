# SPDX-License-Identifier: Apache-2.0
"""What a training script said last, without what its launcher says of itself and of the failure."""

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
    """The last ``count`` lines, oldest first.

    Where torchrun ended because the script failed, what the script said before; where it failed
    by itself, its own words. horovodrun marks what its workers say; before the first of them
    speaks, only it has something to say.
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
    """The same from a log file, of which only the end is read."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - MAX_BYTES))
        return last_words(file.read().decode(errors="replace").splitlines(), count)
