# SPDX-License-Identifier: Apache-2.0
"""The live screen of ``muster top``: redrawn at each change and each second, with keys."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from time import time

import click
from click.core import ParameterSource
from rich.console import Console
from rich.live import Live
from rich.text import Text

from agent.telemetry.logs import printable
from console.job.output import rendered
from console.style import is_styled
from console.top.keys import HELP, Keyboard, Verb, meaning_of, moved, verb_of
from console.top.screen import TopScene, top_grids

REDRAW_S = 1.0
"""Interval at which ages are drawn anew."""


async def show_live(scenes: AsyncIterator[TopScene]) -> None:
    """Show scenes until ``q``, or until no more come."""
    keyboard, console, chosen = Keyboard(), Console(force_terminal=True), None
    where = _where(click.get_current_context())
    scene: TopScene | None = None
    coming = asyncio.ensure_future(anext(scenes))
    try:
        while True:
            verb: Verb | None = None
            with (
                keyboard.listening(),
                Live(console=console, screen=True, auto_refresh=False) as live,
            ):
                key = asyncio.ensure_future(keyboard.key())
                while verb is None:
                    if scene is not None:
                        live.update(_drawn(scene, chosen, console), refresh=True)
                    waits = {coming, key}
                    done, _ = await asyncio.wait(
                        waits, timeout=REDRAW_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    if coming in done:
                        scene = coming.result()
                        coming = asyncio.ensure_future(anext(scenes))
                    if key not in done or scene is None:
                        continue
                    meaning = meaning_of(key.result())
                    key = asyncio.ensure_future(keyboard.key())
                    line = scene.line(time())
                    pods = scene.choices(line)
                    if meaning == "quit":
                        key.cancel()
                        return
                    if meaning in ("up", "down"):
                        chosen = moved(pods, chosen, 1 if meaning == "down" else -1)
                    chosen = chosen if chosen in pods else None
                    verb = verb_of(meaning, scene.job, chosen, paused=line.phase == "paused")
                key.cancel()
            await _run(verb, where)
    except StopAsyncIteration:
        return
    finally:
        coming.cancel()
        with suppress(asyncio.CancelledError, StopAsyncIteration):
            await coming


def _drawn(scene: TopScene, chosen: str | None, console: Console) -> Text:
    grids = top_grids(scene, time(), chosen=chosen or "", keys=HELP)
    text = rendered(grids, console.width, is_styled(sys.stdout))
    return Text.from_ansi("\n".join(text.splitlines()[: console.height - 1]), no_wrap=True)


async def _run(verb: Verb, where: list[str]) -> None:
    """Run a command in the terminal, and return when its user has seen what it said."""
    if verb.question and not await asyncio.to_thread(click.confirm, printable(verb.question)):
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C ends the command, not this
    try:
        words = [sys.executable, "-m", "console.main", verb.name, *where, *verb.words]
        process = await asyncio.create_subprocess_exec(*words)
        await process.wait()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    await asyncio.to_thread(click.pause, "press a key to go back")


def _where(context: click.Context) -> list[str]:
    """Return the options by which the user has named the store or the cluster, to pass them on."""
    words = []
    for one in context.command.params:
        typed = context.get_parameter_source(one.name or "") is ParameterSource.COMMANDLINE
        if isinstance(one, click.Option) and typed and one.name != "job":
            words += [max(one.opts, key=len), str(context.params[one.name or ""])]
    return words
