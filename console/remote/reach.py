# SPDX-License-Identifier: Apache-2.0
"""The cluster that a command is about: the options of kubectl, and the client."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import click

from console.context_file import defaults
from console.help import CLUSTER_SECTION, SectionedOption
from console.whereabouts import ClusterOptions as ClusterOptions
from console.whereabouts import with_cluster_options
from controller.cluster.access import access_of
from controller.cluster.api import ClusterApi


@asynccontextmanager
async def cluster(options: ClusterOptions) -> AsyncIterator[ClusterApi]:
    """Open the API server; ``namespace`` of the client is the one given, else the context's.

    Raises ``ConfigError``.
    """
    access = await asyncio.to_thread(access_of, os.environ, options.kubeconfig, options.context)
    async with ClusterApi(access, options.namespace) as api:
        yield api


def through_the_api_server(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with those of ``ClusterOptions``, as its argument ``options``."""

    @functools.wraps(command)
    def read(
        kubeconfig: str | None, context: str | None, namespace: str | None, **arguments: Any
    ) -> Any:
        options = ClusterOptions(kubeconfig, context, namespace)
        options = options.completed(defaults(os.environ), os.environ)
        return command(options=options, **arguments)

    namespace_option = click.option(
        "-n",
        "--namespace",
        cls=SectionedOption,
        section=CLUSTER_SECTION,
        metavar="NAME",
        help="Namespace of the job.  [default: (that of the context)]",
    )
    return with_cluster_options(namespace_option(read))
