# SPDX-License-Identifier: Apache-2.0
"""``muster help``: the help of a command, and of the settings that all commands share."""

from __future__ import annotations

import click

from agent.config.job import StoreConfig
from console.help import STORE_TOPIC, Command
from console.options import configured_by
from rdzv.errors import ConfigError


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
