# SPDX-License-Identifier: Apache-2.0
"""``muster pause``, ``muster resume``: all ranks save and leave; the next start goes on there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from functools import partial
from time import time

import click

from agent.job_config import JobConfig
from agent.telemetry.logs import printable
from agent.verdict.view import JobView, present_view
from console.help import Command
from console.job.changing import check_versions, present_job, requester, write
from console.job.reading import connected, news
from console.options import configured_by, job_named, printed, read_option
from launcher_shim.pod.launchers import CENTRAL
from rdzv.drain.standing import asked
from rdzv.drain.transactions import first_write, lift
from rdzv.job import JobClient
from rdzv.records.drain import Drain
from rdzv.records.job import Happening, HistoryEntry, Member
from rdzv.settings import free_text
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, GuardedWrites, Operation, Put

STATUS = {"paused": 0, "resumed": 4, "unsaved": 6}
"""Exit status by the outcome of the wait."""

FOLLOW = "it goes on by itself; to follow it: muster pause {job} --wait, or muster status {job} -w"

SOURCE = "pause"
"""Source of the drain of a central launcher by which a pause has its ranks save."""

STAYS = "what is trained is in the memory of the workers alone; keep their pods"

RoundName = tuple[str, int]
"""The run and the number of a round that trains."""


@dataclass(frozen=True, slots=True)
class PausePhase:
    """The progress of a pause. ``ending`` is set once it is over: a key of ``STATUS``."""

    name: str
    sentence: str
    ending: str = ""


def phase_of(view: JobView, ended: RoundName | None) -> tuple[PausePhase, RoundName | None]:
    """Return the phase, and the world that trains now; ``ended`` is the world last seen training.

    If several runs train, the phase is that of the newest.
    """
    job, commit = view.job, view.snapshot.commit
    if job is None or not job.paused:
        return PausePhase("resumed", "the job is not paused any more", "resumed"), None
    if launchers_of(view.snapshot):
        return _of_central(view.snapshot), None
    training = [run for run in view.runs if run.round.complete and not run.round.closed]
    if not training:
        return _ended(view, ended), None
    run = max(training, key=lambda run: run.round.mod_revision)
    world = run.run_id, run.round.number
    size = len(run.round.frozen)
    if run.round.finishing:
        return PausePhase("finishing", "its work is done: it ends by itself"), world
    if commit is None or not commit.is_of(*world):
        return PausePhase("pausing", f"{size} members train; the save has not begun yet"), world
    if commit.phase == "hold":
        return PausePhase("agreeing", "all ranks are asked to stop at their next step"), world
    if commit.phase == "commit":
        return PausePhase("saving", f"all ranks save at step {commit.step}"), world
    if commit.phase == "done":
        return PausePhase("saved", f"all ranks saved step {commit.step}: the world ends"), world
    return PausePhase("pausing", commit.reason or f"{size} members train"), world


def _ended(view: JobView, world: RoundName | None) -> PausePhase:
    commit, last = view.snapshot.commit, view.snapshot.commit_to_start_from
    at = "" if last is None else f"; the next start goes on from step {last.step}"
    saved = commit is not None and commit.phase == "done" and commit.step is not None
    if world is None or (saved and commit is not None and commit.is_of(*world)):
        return PausePhase("paused", f"no world trains{at}", "paused")
    why = "the world ended without a save: nothing to save, or a script takes no part"
    return PausePhase("unsaved", f"{why}{at}", "unsaved")


def _of_central(snapshot: Snapshot) -> PausePhase:
    """Return a central launcher's phase: it has no rounds, and its own drain has the save."""
    drain = asked(snapshot)
    if drain is None:
        return PausePhase("paused", f"{CENTRAL.name} has no hosts, and waits", "paused")
    if drain.step is not None:
        at = f"step {drain.step} is saved; {CENTRAL.name} and its workers wait in their pods"
        return PausePhase("paused", at, "paused")
    if drain.outcome:
        why = f"no save: {STAYS}"
        return PausePhase("unsaved", why, "unsaved")
    if drain.saver:
        return PausePhase("saving", f"a rank of {drain.saver} saves before its next commit")
    return PausePhase("pausing", "the ranks are asked which of them saves")


@click.command(
    cls=Command,
    statuses={
        4: "with --wait: it was resumed",
        6: "with --wait: nothing was saved",
    },
    help=f"""\
Pause JOB: all ranks save the same step, then training stops.

The pods may stay or be deleted: the job is paused until muster resume. The next world starts
from the save.

{CENTRAL.paused}
""",
    epilog="\b\nExamples:\n  muster pause digits --wait\n  muster resume digits",
)
@job_named
@configured_by(JobConfig)
@click.option(
    "--reason", default="asked for by hand", show_default=True, help="Reason shown in history."
)
@click.option("--wait", is_flag=True, help="Print each phase, until no world trains.")
@printed
def pause(config: JobConfig, reason: str, wait: bool, as_json: bool) -> int:
    """Pause a job, and wait if that is asked for; return the exit status."""
    why = read_option("--reason", free_text, reason)
    return asyncio.run(_pause(config, why, wait=wait, as_json=as_json))


@click.command(
    cls=Command,
    epilog="\b\nExample:\n  muster resume digits",
)
@job_named
@configured_by(JobConfig)
def resume(config: JobConfig) -> int:
    """Resume JOB: its pods form the next world, from the last save.

    If JOB is not paused, but waits as its worlds fail before a step, it tries again at once.
    """
    asyncio.run(_resume(config))
    return 0


async def _pause(config: JobConfig, reason: str, *, wait: bool, as_json: bool) -> int:
    async with connected(config) as client:
        check_versions(config.job, client.membership.snapshot())
        _, world = phase_of(_as_paused(present_view(client)), None)
        await _write(config, client, "pause", reason, paused=True)
        stays = f"job {config.job} stays paused"
        return await _follow(client, world, stays, to_the_end=wait, as_json=as_json)


async def _resume(config: JobConfig) -> None:
    async with connected(config) as client:

        def lifted(snapshot: Snapshot) -> GuardedWrites | None:
            """Plan to take back the drain by which a pause asked for a save."""
            found = (snapshot.drains.get(one.pod_uid) for one in launchers_of(snapshot))
            ours = [one for one in found if one is not None and one.source == SOURCE]
            return lift(client.keys, snapshot, ours[0]) if ours else None

        # First: a drain that stayed would keep the next pause from asking for a save.
        while await write(client, lifted):
            pass
        view = present_view(client)
        waited = any(wait.wait_s for run in view.runs if (wait := view.back_off(run)) is not None)
        if await _write(config, client, "resume", "asked for by hand", paused=False, anyhow=waited):
            members = len(client.membership.snapshot().members)
            done = "tries again at once" if waited else "is resumed"
            click.echo(f"job {config.job} {done}: {members} members are there")
        else:
            click.echo(f"job {config.job} is not paused: nothing changes")


def _as_paused(view: JobView) -> JobView:
    job = view.job
    paused = None if job is None else replace(job, paused=True)
    return replace(view, snapshot=replace(view.snapshot, job=paused))


def _save_of(launcher: Member, pause: HistoryEntry) -> Drain:
    """Return the drain that asks the ranks for a save; it has no deadline, as no pod has to go."""
    return Drain(
        pod_uid=launcher.pod_uid,
        member=launcher.name,
        reason=f"the job pauses: {pause.why}",
        source=SOURCE,
        requested_by=pause.member,
        at_unix_s=pause.at_unix_s,
    )


def launchers_of(snapshot: Snapshot) -> list[Member]:
    """Return the members that run a central launcher."""
    return [one for one in snapshot.members.values() if one.role == "launcher"]


async def _write(
    config: JobConfig,
    client: JobClient,
    what: Happening,
    why: str,
    *,
    paused: bool,
    anyhow: bool = False,
) -> bool:
    """Write ``paused`` into the job's record, ``anyhow`` or if that changes it; tell if it did."""

    def plan(snapshot: Snapshot) -> GuardedWrites | None:
        job = present_job(config, client, snapshot)
        if job.paused == paused and not anyhow:
            return None
        entry = HistoryEntry(what, requester(), why, time())
        compares = [Compare(client.keys.job, "mod", "=", job.mod_revision)]
        operations: list[Operation] = [
            Put(client.keys.job, replace(job, paused=paused).to_json()),
            *client.history(entry),
        ]
        for launcher in launchers_of(snapshot) if paused else ():
            if launcher.pod_uid not in snapshot.drains:
                ask = first_write(client.keys, snapshot, _save_of(launcher, entry))
                compares += ask[0]
                operations += ask[1]
        return compares, operations

    return await write(client, plan)


async def _follow(
    client: JobClient, world: RoundName | None, stays: str, *, to_the_end: bool, as_json: bool
) -> int:
    """Report each phase; return the exit status of the outcome, or 0 without ``to_the_end``.

    Without ``to_the_end`` it returns after the first phase. ``stays``: the state of the job while
    the store does not answer, for the error.
    """
    told: PausePhase | None = None
    while True:
        sequence = client.mirror.sequence
        phase, trains = phase_of(present_view(client), world)
        world = trains or world
        if phase != told:
            told = phase
            click.echo(_line(phase, as_json=as_json))
        if phase.ending:
            return STATUS[phase.ending] if to_the_end else 0
        if not to_the_end:
            if not as_json:
                click.echo(FOLLOW.format(job=client.keys.job_name))
            return 0
        await news(client.mirror, partial(client.mirror.changed_after, sequence), stays)


def _line(phase: PausePhase, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(
            {"phase": phase.name, "sentence": phase.sentence, "outcome": phase.ending}
        )
    return printable(f"{phase.name:<10} {phase.sentence}")
