# SPDX-License-Identifier: Apache-2.0
"""``muster top``: the state, the pods and the last events of one job, on one screen."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from time import time

import click

from agent.config.job import JobConfig
from console.help import Command
from console.job.output import print_grids
from console.job.reading import following
from console.job.status_json import status_json
from console.options import configured_by, job_named
from console.style import on_terminal
from console.top.live import show_live
from console.top.screen import TopScene, top_grids

IN_A_CLUSTER = "console.top.in_cluster:in_the_cluster"


@click.command(
    cls=Command, epilog="\b\nExamples:\n  muster top digits\n  muster top digits -n team-a"
)
@job_named
@configured_by(JobConfig, elsewhere=IN_A_CLUSTER)
def top(config: JobConfig) -> None:
    """Show one job on one screen: its state, its pods and its last events.

    Keys drain the chosen pod, pause or resume the job, and show its logs. In a pipe it prints the
    screen once.
    """
    asyncio.run(show_scenes(_of_store(config)))


async def _of_store(config: JobConfig) -> AsyncIterator[TopScene]:
    async with following(config) as views:
        async for view in views:
            yield TopScene(view.namespace, view.name, status_json(view, time()), None)


async def show_scenes(scenes: AsyncIterator[TopScene]) -> None:
    """Show scenes as they come, until ``q`` or Ctrl-C; in a pipe only the first one."""
    async with aclosing(scenes) as found:  # type: ignore[type-var]
        if on_terminal(sys.stdout) and sys.stdin.isatty():
            await show_live(found)
            return
        async for scene in found:
            print_grids(top_grids(scene, time()), sys.stdout)
            return
