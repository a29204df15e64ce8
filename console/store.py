# SPDX-License-Identifier: Apache-2.0
"""``muster store``: the embedded store, for laptops and tests."""

from __future__ import annotations

import asyncio
import signal

import click

from console.help import Command
from rdzv.store.memory.server import EmbeddedServer


@click.command(
    cls=Command,
    epilog="Example: muster store --listen 127.0.0.1:2379",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:2379",
    show_default=True,
    help="Where to listen; port 0 takes a free one.",
)
def store(listen: str) -> None:
    """Serve the embedded store over etcd's v3 gRPC API; etcdctl works on it."""
    asyncio.run(_serve(listen))


async def _serve(listen: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with EmbeddedServer(listen) as server:
        click.echo(f"The store listens on {server.endpoint}.")
        click.echo("It keeps nothing across a restart: for a job that matters, use etcd.")
        await stop.wait()
