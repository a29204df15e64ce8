# SPDX-License-Identifier: Apache-2.0
"""``muster version`` for a defect report, and ``muster help``."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import click

import console
import muster
from agent.job_config import StoreConfig
from console.help import STORE_TOPIC, Command
from console.options import configured_by
from rdzv.errors import ConfigError
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


@click.command(cls=Command, epilog="Example: muster help status")
@click.argument("name", metavar="[COMMAND|store-options]", required=False)
@click.pass_context
def show_help(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, or the options of the store, which most commands have."""
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    if name is None:
        return click.echo(ctx.find_root().get_help())
    command = store_options if name == STORE_TOPIC else group.get_command(ctx, name)
    if command is None:
        raise ConfigError(f"there is no command {name!r}: muster --help lists them")
    with click.Context(command, info_name=name, parent=ctx.find_root()) as shown:
        click.echo(command.get_help(shown))


@click.command(cls=Command, epilog="Example: muster status digits --etcd-endpoints etcd:2379")
@configured_by(StoreConfig)
def store_options(config: StoreConfig) -> None:
    """Options of the store: where it is, and how to get in. Most commands have them.

    Each is also an environment variable, named in brackets; the option wins.
    """
