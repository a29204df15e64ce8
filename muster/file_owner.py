# SPDX-License-Identifier: Apache-2.0
"""The process that a progress file is of, read from its line."""

from __future__ import annotations

import json
import os
from typing import NamedTuple, Optional

READS = 5
"""Maximum number of reads of a line that its owner may just be overwriting."""
LINE_MAX = 4096


class FileOwner(NamedTuple):
    """A process: its number, when it began in clock ticks since boot, and its round's name."""

    pid: int
    started: int
    master: str


def living_owner(path: str) -> Optional[FileOwner]:
    """Return the owner of the file at ``path``; None if there is none, or it has ended."""
    for _ in range(READS):
        try:
            with open(path, "rb") as file:
                fields = json.loads(file.read(LINE_MAX))
            owner = FileOwner(int(fields["pid"]), int(fields["started"]), str(fields["master"]))
        except OSError:
            return None
        except (ValueError, KeyError, TypeError):
            continue  # parts of two lines
        return owner if began(str(owner.pid)) == owner.started else None
    return None


def began(process: str) -> Optional[int]:
    """Read when a process, by number or "self", began, in ticks since boot; None if it has ended.

    Fields 3 and 22 of proc(5)'s ``stat``.
    """
    try:
        with open(os.path.join("/proc", process, "stat"), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
