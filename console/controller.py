# SPDX-License-Identifier: Apache-2.0
"""``muster controller``: the part of Muster that needs permissions in a cluster."""

from __future__ import annotations

import asyncio

import click

from agent.telemetry import logs
from console.help import Command
from console.options import configured_by
from controller.config import ControllerConfig, defaults


@click.command(
    cls=Command,
    epilog="""\b
Example:
  muster controller --own-namespace muster-system \\
      --default image=example.org/muster-sidecar:0.2.0 \\
      --default etcd-endpoints=etcd.muster-system.svc:2379
""",
)
@configured_by(ControllerConfig)
@click.option(
    "--default",
    "given",
    multiple=True,
    metavar="NAME=VALUE",
    help="Default for NAME if neither the pod's annotation muster.dev/NAME nor its owner sets it;"
    " may be given again.",
)
def controller(config: ControllerConfig, given: tuple[str, ...]) -> int:
    """Put the sidecar into pods with the label muster.dev/inject: "true", as they are made.

    It runs in a pod, and needs the extra muster-elastic[controller]. Jobs need it only while pods
    are made: without it, pods start without a sidecar, and those that run are not touched.
    """
    environ = defaults(given)
    logs.configure(config.log_format, {"component": "controller"})
    from controller.process import run  # needs the extra

    return asyncio.run(run(config, environ))
