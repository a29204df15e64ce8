# SPDX-License-Identifier: Apache-2.0
"""The image's own program of a name, behind the one of Muster's that is first in the PATH."""

from __future__ import annotations

import os
from typing import Mapping, Optional


def images_own(name: str, program: str, environ: Mapping[str, str]) -> Optional[str]:
    """Find the program ``name`` that the PATH has beside ``program``; None if there is none."""
    for directory in os.get_exec_path(dict(environ)):
        path = os.path.join(directory, name)
        runs = os.path.isfile(path) and os.access(path, os.X_OK)
        if runs and not os.path.samefile(path, program):
            return path
    return None
