# SPDX-License-Identifier: Apache-2.0
"""Programs that are run to their end."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
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


def older_pythons() -> Iterator[str]:
    """A Python 3.8 that runs, where the machine has one: a shim may stand for none."""
    kept = Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8")
    for path in (shutil.which("python3.8") or "", *map(str, kept)):
        if path and not subprocess.run([path, "-c", ""], stderr=subprocess.DEVNULL).returncode:
            yield path
            return
