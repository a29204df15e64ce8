# SPDX-License-Identifier: Apache-2.0
"""The launchers that Muster drives: one row each."""

from __future__ import annotations

import os
from typing import List, Optional, Sequence, Tuple

from launcher_shim.horovod.pod.launcher import HOROVODRUN
from launcher_shim.launcher import Launcher
from launcher_shim.rundir import layout
from launcher_shim.torchrun.launcher import TORCHRUN

LAUNCHERS: List[Launcher] = [TORCHRUN, HOROVODRUN]
CENTRAL: Launcher = HOROVODRUN
"""The one that runs in a launcher's pod, and starts its workers in the others."""


def named(name: str) -> Optional[Launcher]:
    """Return the launcher of that name; None if there is none."""
    return next((one for one in LAUNCHERS if one.name == name), None)


def has_rounds(name: str) -> bool:
    """Return whether a launcher of that name asks for rounds, or may still start one that does."""
    launcher = named(name)
    return launcher is None or launcher.has_rounds


def found(words: Sequence[str]) -> Tuple[Optional[Launcher], int]:
    """Return the launcher that a command line starts, and the index behind the words that do."""
    for at, word in enumerate(words):
        for one in LAUNCHERS:
            if after := one.found_in(words, at):
                return one, after
        if os.path.basename(word).endswith((".py", ".sh")):
            break  # the rest is for that script; a launcher that it starts is a process of its own
    return None, 0


def serves_workers(command: Sequence[str]) -> bool:
    """Return whether a container's command is the agent of a central launcher's workers.

    Nothing is complete when it ends, so its end says nothing about the job.
    """
    return os.path.basename(command[0]) == layout.MUSTER_EXEC
