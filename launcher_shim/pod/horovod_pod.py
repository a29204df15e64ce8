# SPDX-License-Identifier: Apache-2.0
"""The part of a pod in a Horovod job, that of the launcher or of the workers: pure."""

from __future__ import annotations

import os
from typing import Dict, List, Mapping, Sequence, Tuple

from launcher_shim.rundir import layout


def is_launcher(delivered: Mapping[str, str]) -> bool:
    """Return whether horovodrun runs in this pod, by the variables that its sidecar delivered."""
    return delivered.get("MUSTER_ROLE") == "launcher"


def serves_workers(command: Sequence[str]) -> bool:
    """Return whether a container's command is the agent of horovodrun's workers.

    Nothing is complete when it ends, so its end says nothing about the job.
    """
    return os.path.basename(command[0]) == layout.MUSTER_EXEC


def found_first(
    command: Sequence[str], environ: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return command and variables, changed to find a horovodrun given by its path in the PATH.

    Muster's own, which is first in the PATH, then finds the image's right behind it.
    """
    folder, name = os.path.split(command[0])
    if name != layout.HOROVODRUN or not folder:
        return list(command), dict(environ)
    ours, colon, rest = environ.get("PATH", os.defpath).partition(os.pathsep)
    path = os.pathsep.join([ours, folder, *([rest] if colon else [])])
    return [name, *command[1:]], {**environ, "PATH": path}
