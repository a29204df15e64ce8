# SPDX-License-Identifier: Apache-2.0
"""``muster version``: what a report of a defect begins with."""

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


@click.command(cls=Command, short_help="The versions of Muster, its store schema, Python, torch.")
def version() -> None:
    """Print the versions of Muster, its store schema, Python and torch."""
    click.echo(described())


def print_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    """Print it for ``--version``, and end."""
    if asked:
        click.echo(described())
        ctx.exit()


def described() -> str:
    """Say in one line which Muster this is, and on what it runs."""
    commit = _commit(Path(console.__file__).parent.parent)
    program = f"muster {muster.__version__}" + (f" ({commit})" if commit else "")
    return f"{program}, store schema {SCHEMA}, python {platform.python_version()}, {_torch()}"


def _torch() -> str:
    """Torch's version without importing it, which takes seconds."""
    try:
        return f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return "no torch"


def _commit(root: Path) -> str:
    """The commit of the checkout this runs from; empty where it is installed."""
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
