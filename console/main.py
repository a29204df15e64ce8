# SPDX-License-Identifier: Apache-2.0
"""The command line ``muster``: each command is imported only when it is asked for.

Exit status: 0 done, 2 usage or configuration, 69 store not reachable, 70 a defect of ours.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import cast

import click

from launcher_shim.exit_status import (
    EXIT_BROKEN_PIPE,
    EXIT_DEFECT,
    EXIT_INTERRUPTED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)
from rdzv.errors import ConfigError, MembershipError, MusterError, StoreError

COMMANDS = {
    "admit": "console.job.admit:admit",
    "agent": "console.agent:agent",
    "doctor": "console.doctor.command:doctor",
    "drain": "console.job.drain:drain",
    "forget": "console.job.forget:forget",
    "history": "console.job.history:history",
    "hosts": "console.job.hosts:hosts",
    "inject": "console.inject.command:inject",
    "local": "console.local.command:local",
    "notice": "console.notice:notice",
    "status": "console.job.status:status",
    "store": "console.store:store",
    "store-role": "console.store_role:store_role",
}


class LazyGroup(click.Group):
    """A group that knows its commands by name: the sidecar loads no table or chart."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, name = place.partition(":")
        return cast(click.Command, getattr(import_module(module), name))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def muster() -> None:
    """Keep elastic training jobs running while their pods come and go."""


def main() -> None:
    """Run the command line and end the process with its exit status: what the command returns."""
    # grpc reads this once, when it is imported; by default it tells of each connection that ends.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        status = muster.main(prog_name="muster", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Who read our output has gone; Python must not try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BROKEN_PIPE)
    except MusterError as error:
        click.echo(f"muster: {error}".replace("\n", "\nmuster: "), err=True)
        sys.exit(_status(error))
    except Exception:
        traceback.print_exc()
        click.echo("muster: this is a defect of muster, please report it", err=True)
        sys.exit(EXIT_DEFECT)


def _status(error: MusterError) -> int:
    if isinstance(error, ConfigError | MembershipError):
        return EXIT_USAGE
    return EXIT_UNAVAILABLE if isinstance(error, StoreError) else EXIT_DEFECT


if __name__ == "__main__":
    main()
