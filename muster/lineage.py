# SPDX-License-Identifier: Apache-2.0
"""The processes between a rank and its torchrun, to notice that torchrun is gone.

A rank's parent is torchrun itself, or a script that torchrun was told to start instead of Python
(``torchrun --no-python ./train.sh``) and that lives on when torchrun is killed.
"""

from __future__ import annotations

import os
import sys
from typing import Callable, List, Mapping, Optional, Tuple

DEPTH_MAX = 32
OWN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "RANK")
"""Variables that torchrun sets for a rank, and for the scripts around it, and does not have in its
own environment, or has with other values if another torchrun's rank has started it."""


class Lineage:
    """The ancestors of this process up to its torchrun; just the parent if the system is not Linux.

    Raises nothing: a process that cannot be inspected is taken for torchrun.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        own = {name: environ.get(name) for name in OWN}
        self._parent = pid = os.getppid()
        pid = sys.__dict__.get("muster_stub", pid)
        self._above: List[Tuple[int, int]] = []
        """Process and parent, for each ancestor below torchrun."""
        while own[OWN[0]] and len(self._above) < DEPTH_MAX and _has_environment(pid, own):
            try:
                parent = _parent_of(pid)
            except OSError:
                break
            if not parent:
                break
            self._above.append((pid, parent))
            pid = parent

    @property
    def broken(self) -> bool:
        """Whether an ancestor is gone, so that nobody above it knows of this process any more."""
        if os.getppid() != self._parent:
            return True
        return any(_is_gone(pid, parent) for pid, parent in self._above)


def report_imports() -> None:
    """Let the zygote that this process is a fork of import the same modules for the next ones.

    Does nothing in any other process, or a second time; see ``launcher_shim.pod.warm``.
    """
    report: Optional[Callable[[], None]] = sys.__dict__.pop("muster_imported", None)
    if report is not None:
        report()


def _has_environment(pid: int, own: Mapping[str, Optional[str]]) -> bool:
    """Return whether a process was started with the rank's variables."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            parts = file.read().decode(errors="surrogateescape").split("\0")
    except OSError:
        return False
    environ = dict(part.split("=", 1) for part in parts if "=" in part)
    return all(environ.get(name) == value for name, value in own.items())


def _is_gone(pid: int, parent: int) -> bool:
    """Return whether a process has ended, or its parent has."""
    try:
        return _parent_of(pid) != parent
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False  # it cannot be inspected, as when this process has no file descriptor left


def _parent_of(pid: int) -> int:
    """Read the parent of a process; raises ``OSError``."""
    with open("/proc/%d/stat" % pid, "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
