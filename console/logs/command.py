# SPDX-License-Identifier: Apache-2.0
"""``muster logs``: the lines of a job's training containers, by rank, world after world.

Those of a job that ``muster local`` runs come from its files, which have no times. So past lines
are shown node by node. Lines that come have the time at which they are read.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns

import click

from agent.job_config import JobConfig
from agent.telemetry.logs import printable
from console.help import Command
from console.job.reading import following, look
from console.logs.following import JobLogs, Print
from console.logs.lines import Line, Origin, Source, rank_of, shown
from console.logs.printing import Pages, PrintedLine, Selection, first_failure, world_of
from console.logs.sources import history_of
from console.remote.passing import no_job
from console.remote.pods import ClusterOptions, cluster, pods_of, through_the_api_server
from console.styling import is_styled, note
from console.whereabouts import RunningJob, ended_run, found_running, is_cluster_known, running_jobs
from rdzv.errors import ConfigError, JobNotFound
from rdzv.records.job import HistoryEntry
from rdzv.settings import load

LOOK_S = 0.2
"""Interval at which files are read: the order of lines of two nodes is known to this."""

PIECE_BYTES = 2**16
LINE_MAX = 2**20
"""The longest line in one piece, in characters."""

SIDECAR = "sidecar.log"

_EXAMPLES = """\b
Examples:
  muster logs digits -f
  muster logs digits --rank 0 --tail 20
  muster logs digits --world 3
  muster logs digits --why
"""

_RANK_COLOURS = ("cyan", "green", "magenta", "blue", "yellow")


@dataclass(slots=True)
class LogFile:
    """One file, and how far it is read."""

    path: Path
    source: Source
    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _rest: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the whole lines that are new; blocks on the disk."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while piece := file.read(PIECE_BYTES):
                self.offset += len(piece)
                *whole, self._rest = (self._rest + self._decoder.decode(piece)).split("\n")
                yield from whole
                if len(self._rest) > LINE_MAX:
                    yield self._rest
                    self._rest = ""

    def all(self) -> Iterator[str]:
        """Yield what is new of a file that is written no more, also a line without its end."""
        yield from self.lines()
        if self._rest:
            yield self._rest


@dataclass(slots=True)
class LocalLogs:
    """The logs of one job of ``muster local``; ``ended``: nothing is added to them."""

    job: RunningJob
    pages: Pages
    print: Print
    tail: int | None = None
    with_sidecar: bool = False
    ended: bool = False
    _files: dict[Path, LogFile] = field(default_factory=dict)

    def show_past(self) -> None:
        """Print the lines up to now, node by node; blocks on the disk."""
        self._find()
        for one in self._files.values():
            lines = one.all() if self.ended else one.lines()
            past = lines if self.tail is None else deque(lines, self.tail)
            for text in past:
                if not self.pages.wanted.all:
                    continue  # their rank and world are not known
                self.print(PrintedLine(shown(text), Origin(one.source)))

    async def follow(self, config: JobConfig) -> None:
        """Print the lines up to now, and those that come, to the job's end."""
        await asyncio.to_thread(self.show_past)
        worlds = asyncio.create_task(self._follow_worlds(config), name="worlds")
        try:
            while True:
                runs = await asyncio.to_thread(self._runs)
                await self.look()
                if not runs:
                    return
                if worlds.done():
                    worlds.result()
                await asyncio.sleep(LOOK_S)
        finally:
            worlds.cancel()

    def _find(self) -> None:
        """Find the files of nodes that are new; blocks on the disk."""
        for path in sorted(Path(self.job.logs).glob("*/*.log")):
            if path in self._files or (path.name == SIDECAR and not self.with_sidecar):
                continue
            also = "sidecar" if path.name == SIDECAR else ""
            self._files[path] = LogFile(path, Source(path.parent.name, also))

    async def look(self) -> None:
        """Print the lines that have come since the last look."""
        await asyncio.to_thread(self._find)
        for one in self._files.values():
            for text in await asyncio.to_thread(list, one.lines()):
                for line in self.pages.print(Line(time_ns(), one.source, text)):
                    self.print(line)
        for line in self.pages.rest():  # a new world may say nothing for long
            self.print(line)

    def _runs(self) -> bool:
        return any(one.pid == self.job.pid for one in running_jobs())

    async def _follow_worlds(self, config: JobConfig) -> None:
        began = False
        async with following(config) as views:
            async for view in views:
                self.pages.take_in(view.history)
                self.pages.seat({member.name: member.slots for member, _, _ in view.members()})
                if not began:
                    self.pages.begin()
                    began = True


@click.command(cls=Command, epilog=_EXAMPLES)
@click.argument("job", metavar="[JOB]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Follow new lines, over every change of pods.")
@click.option(
    "--rank",
    "rank_text",
    default="all",
    metavar="N|all|last",
    show_default=True,
    help="Show the lines of one rank.",
)
@click.option(
    "--world",
    "world_text",
    metavar="now|N",
    show_default="each world",
    help="Show the lines of one world, by the number of its round.",
)
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    metavar="N",
    show_default="all lines",
    help="Begin with the last N lines of each container.",
)
@click.option(
    "--why", is_flag=True, help="Show the first error of the newest failure, and no line."
)
@click.option("--muster", "with_sidecar", is_flag=True, help="Show the lines of sidecars, too.")
@through_the_api_server
def logs(
    options: ClusterOptions,
    job: str | None,
    follow: bool,
    rank_text: str,
    world_text: str | None,
    tail: int | None,
    why: bool,
    with_sidecar: bool,
) -> None:
    """Show what a job's training containers print, with the rank of each line.

    Lines of all pods are in the order of their times. A line stands between two worlds. A pod
    outside of its world has its name in place of a rank.
    """
    name = job or os.environ.get("MUSTER_JOB")
    asked = {"job": name, "namespace": options.namespace}
    wanted, screen = Selection(rank_of(rank_text), world_of(world_text)), Screen()

    def of_local(run: RunningJob) -> LocalLogs:
        return LocalLogs(run, Pages(wanted), screen.print, tail, with_sidecar)

    local = None if options.kubeconfig or options.context else found_running(asked, os.environ)
    if why and follow:
        raise ConfigError(
            "--why shows one error; --follow shows lines as they come: give one of them"
        )
    if local is not None and local.logs:
        _show_local(of_local(local), follow, why)
        return
    before = None if options.kubeconfig or options.context else ended_run(name, options.namespace)
    if before is not None and not (name and is_cluster_known(os.environ)):
        _show_ended(of_local(before), why)
        return
    if not name:
        raise ConfigError("no job is named: give its name, or set MUSTER_JOB")

    async def show() -> None:
        async with cluster(options) as api:
            of_job = JobLogs(
                api, name, Pages(wanted), screen.print, screen.note, tail, with_sidecar
            )
            await of_job.show(follow=follow)

    try:
        asyncio.run(_show_why(options, name) if why else show())
    except JobNotFound:
        if before is None:
            raise
        _show_ended(of_local(before), why)


def _show_local(of_local: LocalLogs, follow: bool, why: bool) -> None:
    """Show the logs of a job that ``muster local`` runs."""
    job = of_local.job
    where = {"etcd_endpoints": job.endpoints, "namespace": job.namespace, "job": job.job}
    config = load(JobConfig, where, os.environ)
    note(str(job))
    if why:
        _print_failure(asyncio.run(look(config)).history, job.job)
        return
    if not (of_local.pages.wanted.all or follow):
        raise ConfigError(
            "past lines of muster local have no times: give --rank and --world with --follow"
        )
    if follow:
        asyncio.run(of_local.follow(config))
    else:
        of_local.show_past()


def _show_ended(of_local: LocalLogs, why: bool) -> None:
    """Show the logs of a job that ``muster local`` ran here last."""
    job = of_local.job
    note(f"job {job.job} of muster local has ended: {job.logs}")
    if why or not of_local.pages.wanted.all:
        raise ConfigError(
            f"the store of job {job.job} ended with it, so its ranks, worlds and failures are no"
            " longer known: leave --why, --rank and --world out, or start it with --report DIR"
        )
    of_local.ended = True
    of_local.show_past()


@dataclass(slots=True)
class Screen:
    """Standard output for lines, standard error for sentences about them."""

    styled: bool = field(default_factory=lambda: is_styled(sys.stdout))
    _noted: set[str] = field(default_factory=set)

    def print(self, printed: PrintedLine) -> None:
        """Write one line; the kernel has it at once, for who reads it in a pipe."""
        origin = printed.origin
        text = str(printed)
        if self.styled and origin is None:
            text = click.style(text, bold=True)
        elif self.styled and origin is not None:
            colour = _RANK_COLOURS[(origin.first or 0) % len(_RANK_COLOURS)]
            label = click.style(origin.label, fg=None if origin.first is None else colour)
            text = f"{label} {printed.text}"
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def note(self, sentence: str) -> None:
        """Write a sentence to the user, once."""
        if sentence not in self._noted:
            self._noted.add(sentence)
            note(sentence)


async def _show_why(options: ClusterOptions, job: str) -> None:
    """Print the first error of the newest failure alone."""
    async with cluster(options) as api:
        pods = await pods_of(api, api.namespace, job)
        if not pods:
            raise await no_job(api, job)
        history = await history_of(api, pods)
    _print_failure(history, job)


def _print_failure(history: Sequence[HistoryEntry], job: str) -> None:
    from agent.verdict.view import moment

    failed = first_failure(history)
    if failed is not None:
        line = f"{moment(failed.at_unix_s)}  {failed.member}: {failed.why}"
        click.echo(printable(line))
    else:
        note(f"no failure of {job} is in its history")
