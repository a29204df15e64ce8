# SPDX-License-Identifier: Apache-2.0
"""``muster top``: the state, the pods and the last events of one job, on one screen, with keys.

It is redrawn at each change and each second; its tables are made of what ``muster status --json``
says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from time import time

import click
from click.core import ParameterSource
from rich.console import Console
from rich.live import Live
from rich.text import Text

from agent.job_config import JobConfig
from agent.telemetry.logs import printable
from agent.verdict.states import Level
from console.help import Command
from console.job.output import Grid, Toned, print_grids, rendered
from console.job.reading import following
from console.job.rows import JobLine, PodFacts, PodLine, StatusObject, job_line
from console.job.status_json import status_json
from console.options import configured_by, job_named
from console.styling import is_styled, on_terminal
from rdzv.sentences import counted, duration

KEYS_HELP = "↑↓ choose a pod · d drain it · p pause or resume · l logs · q quit"

_ARROWS = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
_MEANINGS = {"k": "up", "j": "down", "d": "drain", "p": "pause", "l": "logs", "q": "quit"}

EVENTS_SHOWN = 5
"""The events on the screen: the last ones."""

CHOSEN = ">"
"""The mark of the pod that a key is for."""

_LEVELS: dict[str, Level] = {"failed": "fault", "lost": "fault", "quarantine": "warning"}

REDRAW_S = 1.0
"""Interval at which ages are drawn anew."""

IN_A_CLUSTER = "console.remote.get:top_in_the_cluster"


@dataclass(frozen=True, slots=True)
class Verb:
    """A command to run, after ``question`` is answered with yes; empty: at once."""

    name: str
    words: tuple[str, ...]
    question: str = ""


def meaning_of(typed: str) -> str:
    """Return what a key stands for; empty for a key without a meaning."""
    return _ARROWS.get(typed) or _MEANINGS.get(typed.lower(), "")


def moved(pods: Sequence[str], chosen: str | None, step: int) -> str | None:
    """Return the pod that is chosen after a move, from the first one on; None without pods."""
    if not pods:
        return None
    if chosen not in pods:
        return pods[0]
    return pods[max(0, min(len(pods) - 1, pods.index(chosen) + step))]


def verb_of(meaning: str, job: str, chosen: str | None, *, paused: bool) -> Verb | None:
    """Return the command that a key asks for; None for none.

    ``job`` and ``chosen`` are names as the user and the API server give them: a sidecar, which a
    tenant may replace, does not say what a command acts on.
    """
    if meaning == "drain" and chosen is not None:
        return Verb("drain", ("--job", job, "--", chosen), f"drain {chosen}?")
    if meaning == "pause" and paused:
        return Verb("resume", ("--job", job), f"resume {job}?")
    if meaning == "pause":
        return Verb("pause", ("--job", job), f"save and pause {job}?")
    if meaning == "logs":
        return Verb("logs", ("--follow", "--tail", "20", "--", job))
    return None


class Keyboard:
    """The terminal's keyboard: keys come one by one, and are not shown."""

    def __init__(self) -> None:
        self._typed: asyncio.Queue[str] = asyncio.Queue()
        self._descriptor = sys.stdin.fileno()

    async def key(self) -> str:
        """Wait for a key."""
        return await self._typed.get()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Read keys within the context; the terminal is as before after it."""
        before = termios.tcgetattr(self._descriptor)
        loop = asyncio.get_running_loop()
        tty.setcbreak(self._descriptor)
        loop.add_reader(self._descriptor, self._read)
        try:
            yield
        finally:
            loop.remove_reader(self._descriptor)
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, before)

    def _read(self) -> None:
        text = os.read(self._descriptor, 64).decode("utf-8", "replace")
        for typed in [text] if text in _ARROWS else text:
            self._typed.put_nowait(typed)


@dataclass(frozen=True, slots=True)
class TopScene:
    """The state of a job at one moment, as its sidecar or its store and its pods have it.

    ``pods``: those that the API server lists; None without one. ``trouble``: why no state is
    known, or no new one.
    """

    namespace: str
    job: str
    status: StatusObject | None
    pods: Sequence[PodFacts] | None = ()
    trouble: str = ""

    def line(self, now_unix_s: float) -> JobLine:
        """Return the job and its pods."""
        return job_line(
            self.namespace, self.job, self.status, self.pods or (), now_unix_s, trouble=self.trouble
        )

    def choices(self, line: JobLine) -> list[str]:
        """Return the pods that a key may be for, in the order of ``line``.

        Of a cluster they are those that the API server lists: a sidecar may make names up.
        """
        names = dict.fromkeys(pod.name for pod in line.pods)
        listed = None if self.pods is None else {pod.name for pod in self.pods}
        return [name for name in names if listed is None or name in listed]


def top_grids(
    scene: TopScene, now_unix_s: float, *, chosen: str | None = None, keys: str = ""
) -> list[Grid]:
    """Return the tables of the screen; ``chosen``: the pod that a key is for."""
    line = scene.line(now_unix_s)
    grids = [_headline(line, now_unix_s), _figures(line)]
    if line.do:
        grids.append(Grid(f"→ {line.do}", (), (), line.level))
    if line.pods:
        grids.append(_pods(line.pods, chosen))
    status = scene.status or {}
    said = [str(status.get(name) or "") for name in ("slow_save", "straggler")]
    grids += [Grid(one, (), (), "warning") for one in said if one]
    if events := list(status.get("events") or [])[-EVENTS_SHOWN:]:
        rows = tuple(_event(one, now_unix_s) for one in events)
        grids.append(Grid("", ("AGO", "EVENT", "POD", "WHY"), rows, key=2))
    return [*grids, *([Grid(keys, (), (), "note")] if keys else [])]


def _headline(line: JobLine, now_unix_s: float) -> Grid:
    lasts = ""
    if line.since_unix_s:
        lasts = f" for {duration(max(0.0, now_unix_s - line.since_unix_s))}"
    why = f": {line.why}" if line.why else ""
    return Grid(f"{line.namespace}/{line.name} {line.phase}{lasts}{why}", (), (), line.level)


def _figures(line: JobLine) -> Grid:
    """Return the figures of the job, in one line; those that are unknown are left out."""
    found = []
    if line.nodes is not None:
        found.append(f"{counted(line.nodes, 'node')} ({line.least}-{line.most})")
    if line.step is not None:
        found.append(f"step {line.step:,}")
    if line.rate:
        found.append(f"{line.rate:.3g} steps/s, {1 / line.rate:.3g} s a step")
    if line.eta_s is not None:
        found.append(f"done in {duration(line.eta_s)}")
    if line.saved_step is not None:
        ago = "" if line.saved_s is None else f" {duration(line.saved_s)} ago"
        found.append(f"step {line.saved_step:,} saved{ago}")
    elif line.step is not None:
        found.append("nothing saved by all ranks yet")
    return Grid(" · ".join(found) or "no figures yet", (), ())


def _pods(pods: Sequence[PodLine], chosen: str | None) -> Grid:
    rows = []
    for pod in pods:
        waits = "-" if pod.waits is None else f"{pod.waits:.0%}{' slow' if pod.slow else ''}"
        name = pod.name if chosen is None else f"{CHOSEN if pod.name == chosen else ' '} {pod.name}"
        rows.append(
            (
                name,
                Toned(pod.state, pod.level),
                pod.ranks or "-",
                "-" if pod.step is None else f"{pod.step:,}",
                Toned(waits, "warning" if pod.slow else None),
                pod.node or "-",
                "-" if pod.age_s is None else duration(pod.age_s),
                pod.why,
            )
        )
    return Grid("", ("POD", "STATE", "RANKS", "STEP", "WAITS", "NODE", "AGE", "WHY"), tuple(rows))


def _event(one: StatusObject, now_unix_s: float) -> tuple[str, ...]:
    ago_s = max(0.0, now_unix_s - float(one.get("at_unix_s") or now_unix_s))
    what = str(one.get("what") or "")
    who, why = str(one.get("member") or ""), str(one.get("why") or "")
    return (duration(ago_s), Toned(what, _LEVELS.get(what)), who, why)


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
    grids = top_grids(scene, time(), chosen=chosen or "", keys=KEYS_HELP)
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
