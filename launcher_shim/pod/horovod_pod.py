# SPDX-License-Identifier: Apache-2.0
"""What a pod is to a Horovod job: the launcher's, or one in which workers are started: pure."""

from __future__ import annotations

import os
from typing import Dict, List, Mapping, Sequence, Tuple

from launcher_shim.rundir import layout


def is_launcher(delivered: Mapping[str, str]) -> bool:
    """Whether the pod is the one that horovodrun runs in, by what its sidecar has delivered."""
    return delivered.get("MUSTER_ROLE") == "launcher"


def serves_workers(command: Sequence[str]) -> bool:
    """Whether a container's command is the agent of horovodrun's workers.

    Nothing is complete when it ends, so that its end says nothing of the job.
    """
    return os.path.basename(command[0]) == layout.MUSTER_EXEC


def found_first(
    command: Sequence[str], environ: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """The launcher's command and variables, with a horovodrun that is named by its path found so.

    The one that is first in the PATH then finds the image's own right behind it.
    """
    folder, name = os.path.split(command[0])
    if name != layout.HOROVODRUN or not folder:
        return list(command), dict(environ)
    ours, colon, rest = environ.get("PATH", os.defpath).partition(os.pathsep)
    path = os.pathsep.join([ours, folder, *([rest] if colon else [])])
    return [name, *command[1:]], {**environ, "PATH": path}
