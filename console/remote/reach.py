# SPDX-License-Identifier: Apache-2.0
"""The cluster that a command is about: the options of kubectl, and the client."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import click

from console.help import SectionedOption
from controller.cluster.access import access_of
from controller.cluster.api import ClusterApi

SECTION = "Cluster"
"""The heading of the options in the help."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The kubeconfig, its context and the namespace, each as given or None."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None


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
        return command(options=ClusterOptions(kubeconfig, context, namespace), **arguments)

    given = (
        (("--kubeconfig",), "FILE", "Its file.  [KUBECONFIG, or ~/.kube/config; in a pod its own]"),
        (("--context",), "NAME", "Context of the kubeconfig.  [the current one]"),
        (("-n", "--namespace"), "NAME", "Namespace of the job.  [that of the context]"),
    )
    for names, metavar, says in reversed(given):
        option = click.option(
            *names, cls=SectionedOption, section=SECTION, metavar=metavar, help=says
        )
        read = option(read)
    return read
