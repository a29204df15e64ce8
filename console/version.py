# SPDX-License-Identifier: Apache-2.0
"""``muster version``: the versions that a defect report begins with."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import click

import console
import muster
from console.help import Command
from rdzv.records.codec import SCHEMA

GIT_TIMEOUT_S = 5.0


@click.command(cls=Command)
def version() -> None:
    """Print the versions of Muster, its store schema, Python and torch."""
    click.echo(described())


def described() -> str:
    """Return one line with the versions of Muster, its store schema, Python and torch."""
    commit = _commit(Path(console.__file__).parent.parent)
    program = f"muster {muster.__version__}" + (f" ({commit})" if commit else "")
    return f"{program}, store schema {SCHEMA}, python {platform.python_version()}, {_torch()}"


def _torch() -> str:
    """Return torch's version without importing torch, which takes seconds."""
    try:
        return f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return "no torch"


def _commit(root: Path) -> str:
    """Return the commit of the checkout this runs from; empty if it is installed or git fails."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return ""
    command = (git, "-C", str(root), "describe", "--always", "--dirty")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()
