# SPDX-License-Identifier: Apache-2.0
"""``muster agent``: the sidecar."""

from __future__ import annotations

import logging
import os

import click
import uvloop

from agent import process
from agent.config import DELIVERED_VARIABLES, Config
from agent.rundir.programs import LIBRARY_HOME
from agent.telemetry import logs
from console.help import Command
from console.options import configured_by
from rdzv.settings import settings_of, unknown_variables


@click.command(
    cls=Command,
    epilog="Example: muster agent --job digits --min 2 --max 4 --run-dir /tmp/node-0",
)
@configured_by(Config)
def agent(config: Config) -> int:
    """Run the sidecar of one worker: what the image does.

    Every option is also an environment variable, named in brackets; the option wins. Relative
    paths count from the working directory.
    """
    always = {"namespace": config.namespace, "job": config.job, "member": config.member}
    logs.configure(config.log_format, always)
    for sentence in unknown_variables(os.environ, settings_of(Config), DELIVERED_VARIABLES):
        logging.getLogger(__name__).warning("%s", sentence, extra={"event": "unknown_variable"})
    return uvloop.run(process.run(config, delivered_version()))


def delivered_version() -> str:
    """Read the version of the library that the sidecar delivers; to import it takes 1.5 MiB."""
    text = (LIBRARY_HOME / "muster/__init__.py").read_text()
    return text.partition('\n__version__ = "')[2].partition('"')[0]
