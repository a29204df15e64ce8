# SPDX-License-Identifier: Apache-2.0
"""Programs that are run to their end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.sources import ROOT


def ran(
    *words: str | Path, timeout_s: float, stdin: str | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in the folder of the project, with more variables, whatever comes of it."""
    return subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **environ},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
