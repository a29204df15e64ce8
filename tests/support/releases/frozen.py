# SPDX-License-Identifier: Apache-2.0
"""The last release, as its source was: what runs beside this version while a job is upgraded.

An archive of the folders that a sidecar and the commands are made of; CONTRIBUTING.md says how a
release is frozen. It runs from where it is unpacked, with the packages that this version needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.support.sidecars.processes import PATIENT, ROOT

VERSION = "0.1.0"
ARCHIVE = Path(__file__).with_name(f"muster-{VERSION}.tar.xz")


def unpack(directory: Path) -> Path:
    """Unpack it below ``directory``; returns the folder of its packages."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory / f"muster-{VERSION}"


def environ_of(program: Path) -> dict[str, str]:
    """For Python to find the Muster in this folder first, and then what the tests have."""
    path = os.pathsep.join([str(program), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def said(program: Path, *arguments: str, timeout_s: float = 120.0, **environ: str) -> str:
    """What a command of ``muster`` prints, of the Muster in this folder; it has to end well."""
    done = subprocess.run(
        [sys.executable, *PATIENT, *arguments],
        cwd=program,
        env={**environ_of(program), **environ},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def version_of(modules: Path) -> str:
    """The version of the ``muster`` package in a folder of modules."""
    lines = (modules / "muster" / "__init__.py").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("__version__ = "))
    return line.partition(" = ")[2].strip('"')
