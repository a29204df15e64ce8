# SPDX-License-Identifier: Apache-2.0
"""``muster status``, ``muster hosts``: members and rounds of a job, and hosts for launchers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from time import time
from typing import Any

import click

from agent.job_config import JobConfig
from agent.verdict.decision import verdict
from agent.verdict.states import STATES, Level
from agent.verdict.view import JobView
from console.help import Command
from console.job.jobs import list_jobs, pod_grid
from console.job.output import Face, Grid, Toned, show
from console.job.rows import not_running
from console.job.status_json import pods_of, status_json
from console.options import configured_by, job_named, shown_with
from console.whereabouts import found_running as running_job
from rdzv.errors import StoreError, StoreRefused
from rdzv.records.job import Member
from rdzv.sentences import counted
from rdzv.shard_ledger import progress, progress_warning
from rdzv.store.access import Access
from rdzv.store.etcd.admin import auth_enabled
from rdzv.store.etcd.answers import NO_SPACE_CURE
from rdzv.store.etcd.client import EtcdStore

TOPOLOGY = "TOPOLOGY"

AUTH_TIMEOUT_S = 2.5
"""Leaves time for the next endpoint if the first is dead: the first attempt takes 1 s."""

_MORE: Mapping[str, Callable[[Member], str]] = {
    "SLOTS": lambda member: str(member.slots),
    "ROLE": lambda member: member.role,
    "ADDRESS": lambda member: member.address,
    "INCARNATION": lambda member: str(member.incarnation),
    "VERSION": lambda member: member.version or "-",
    TOPOLOGY: lambda member: member.topology or "-",
}
"""The columns of ``--wide``; the topology only if a member has one."""


def _or_all_jobs(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate the command: without a job it lists all.

    It does not if it is to follow one, or if ``muster local`` runs one.
    """

    @wraps(command)
    def read(**arguments: Any) -> Any:
        named = arguments["named"] or arguments["job"] or os.environ.get("MUSTER_JOB")
        in_cluster = arguments["kubeconfig"] or arguments["context"]
        lists = not (named or arguments["watch"])
        if not lists or (not in_cluster and running_job(arguments, os.environ) is not None):
            return command(**arguments)
        shared = {one.name for one in list_jobs.params}
        passed = {name: value for name, value in arguments.items() if name in shared}
        return click.get_current_context().invoke(list_jobs, **passed)

    return read


@click.command(
    cls=Command,
    epilog="\b\nExamples:\n  muster status\n  muster status digits -w\n"
    "  muster status digits -n team-a -o json",
)
@_or_all_jobs
@job_named
@configured_by(JobConfig)
@partial(shown_with, forms=("json", "wide"))
@click.option("--wide", is_flag=True, help="Show each sidecar's address and version, and rounds.")
def status(config: JobConfig, as_json: bool, watch: bool, interval_s: float, wide: bool) -> None:
    """Show the state of a job and why, then each pod, the last save, and the steps at risk.

    Without a JOB it lists the jobs of the store.
    """
    store = StoreState()
    face = Face(
        lambda view: [*_grids(view, wide=wide), *store.warnings(), *_beside()],
        lambda view: "; ".join((_line(view), *_waiting())),
        lambda view: {**status_json(view, time()), **store.as_json(), **_beside_json()},
    )
    show(
        config,
        face,
        as_json=as_json,
        watch=watch,
        interval_s=interval_s,
        aside=lambda: store.ask(config.access),
    )


class StoreState:
    """The store itself: whether authentication is on, and whether it is ``full`` (NOSPACE).

    Each is None if the store does not tell. Both are asked for without a right to write.
    """

    def __init__(self) -> None:
        self.enabled: bool | None = None
        self.full: bool | None = None
        self._trouble = ""

    async def ask(self, access: Access) -> None:
        """Ask the store for both."""
        await asyncio.gather(self._ask_authentication(access), self._ask_space(access))

    async def _ask_authentication(self, access: Access) -> None:
        try:
            self.enabled = await auth_enabled(access, timeout_s=AUTH_TIMEOUT_S)
        except StoreRefused:
            # A server without this request: the embedded one, or etcd before 3.5.
            return
        except StoreError as error:
            self._trouble = str(error)

    async def _ask_space(self, access: Access) -> None:
        store = EtcdStore(access)
        try:
            self.full = (await store.status(timeout_s=AUTH_TIMEOUT_S)).full
        except StoreError as error:
            self._trouble = str(error)
        finally:
            await store.close()

    def warnings(self) -> list[Grid]:
        """Return what an operator should do about the store, if anything."""
        sentences = []
        if self.full:
            sentences.append(
                "the store takes no writes (NOSPACE): worlds that have formed train on; no pod"
                f" joins, no drain commits and no save is put on record until there is room:"
                f" {NO_SPACE_CURE}"
            )
        if self._trouble:
            unknown = "whether authentication is on, or the store is full, is unknown"
            sentences.append(f"{unknown}: {self._trouble}")
        return [Grid(sentence, (), (), "warning") for sentence in sentences]

    def as_json(self) -> dict[str, object]:
        """Return it for ``--json``."""
        return {"store_authenticated": self.enabled, "store_full": self.full}


def _beside() -> list[Grid]:
    lines = not_running(os.environ, time())
    return [pod_grid(lines, wide=False)] if lines else []


def _waiting() -> list[str]:
    return [
        f"{one.name} is {one.state}: {one.why}"
        for one in not_running(os.environ, time())
        if one.why
    ]


def _beside_json() -> dict[str, object]:
    lines = not_running(os.environ, time())
    return {"not_running": [one.as_json() for one in lines]} if lines else {}


def _headline(view: JobView) -> str:
    if view.job is None:
        return f"{view.namespace}/{view.name}: no member has registered yet"
    generation = f"generation {view.job.generation}"
    state = "; ".join(filter(None, (view.pause, view.listing.reason)))
    return f"{view.namespace}/{view.name}, {generation}: {state}"


def _members(view: JobView, now_unix_s: float, *, wide: bool) -> Grid:
    known = any(member.topology for member, _, _ in view.members())
    columns = {name: tell for name, tell in _MORE.items() if wide and (known or name != TOPOLOGY)}
    headings: tuple[str, ...] = ()
    rows = []
    members = view.members(now_unix_s)
    for (member, _, why), pod in zip(members, pods_of(view, now_unix_s), strict=True):
        figures = pod.cells()
        headings = ("MEMBER", "STATE", *figures, "NODE", *columns, "WHY")
        more = (tell(member) for tell in columns.values())
        state = Toned(pod.doing, pod.level)
        rows.append((member.name, state, *figures.values(), member.node, *more, why))
    return Grid(_headline(view), headings, tuple(rows))


def _grids(view: JobView, *, wide: bool) -> list[Grid]:
    runs = tuple(
        (
            run.run_id,
            str(run.round.shown),
            run.state,
            " ".join(seat.member for seat in run.round.frozen),
            " ".join(node.member for node in run.nodes if node.state == "asking"),
        )
        for run in view.runs
    )
    now_unix_s = time()
    found = verdict(view, now_unix_s)
    said = "\n".join(found.lines(view.name, now_unix_s))
    grids = [
        Grid(said, (), (), STATES[found.state].level),
        _members(view, now_unix_s, wide=wide),
        *_saves(view, now_unix_s),
    ]
    if len(runs) > 1 or (wide and runs):
        grids.append(Grid("", ("RUN", "ROUND", "STATE", "NODES BY RANK", "WAITING"), runs))
    forming = [(run.run_id, view.awaited(run, now_unix_s)) for run in view.runs]
    grids += [
        Grid(f"{run_id} is forming: {why}", (), ())
        for run_id, why in forming
        if why and why not in found.why
    ]
    grids += [
        Grid(run.in_place, (), (), None if run.round.world else "warning")
        for run in view.runs
        if run.in_place
    ]
    if view.mute:
        grids.append(Grid(view.mute, (), (), "warning"))
    if view.slow_save:
        grids.append(Grid(view.slow_save, (), (), "warning"))
    if (slow := view.straggler) is not None:
        grids.append(Grid(slow.sentence, (), (), "warning"))
    if clocks := view.clocks(now_unix_s):
        grids.append(Grid(clocks, (), (), "warning"))
    grids += _shards(view)
    if view.snapshot.corrupt:
        corrupt = tuple(sorted(view.snapshot.corrupt.items()))
        grids.append(Grid("records that cannot be read", ("KEY", "WHY"), corrupt, "fault"))
    return grids


def _saves(view: JobView, now_unix_s: float) -> list[Grid]:
    """Return the line on the last save; in red if there is none, and steps are at risk."""
    last = view.last_save
    if last is None:
        return []
    unsaved = last.step is None and bool(last.steps_at_risk)
    level: Level | None = "fault" if unsaved else "warning" if last.late(now_unix_s) else None
    return [Grid(last.sentence(now_unix_s), (), (), level)]


def _shards(view: JobView) -> list[Grid]:
    """Return the progress of the data sets that are handed out in shards, and their warnings."""
    known = [(name, progress(ledger)) for name, ledger in view.shards.items()]
    rows = tuple(
        (name, str(one.epoch), *(f"{n:.1f}" for n in (one.open, one.leased, one.trained, one.done)))
        for name, one in known
        if one is not None
    )
    columns = ("SHARDS OF", "EPOCH", "OPEN", "LEASED", "TRAINED", "DONE")
    told = [
        progress_warning(name, ledger) or ledger.unreadable for name, ledger in view.shards.items()
    ]
    return [Grid("", columns, rows)] * bool(rows) + [Grid(why, (), ()) for why in told if why]


def _line(view: JobView) -> str:
    runs = "".join(
        f"; {run.run_id}: round {run.round.shown}, {counted(len(run.round.frozen), 'node')}"
        for run in view.runs
    )
    found = replace(verdict(view, time()), since_unix_s=0.0)
    return f"{found.lines(view.name, 0.0)[0]}; {_headline(view)}{runs}"


@click.command(
    cls=Command,
    epilog="\b\nExamples:\n  muster hosts digits\n  muster hosts digits -w -o json",
)
@job_named
@configured_by(JobConfig)
@shown_with
def hosts(config: JobConfig, as_json: bool, watch: bool, interval_s: float) -> None:
    """Show the hosts of a job, oldest first: those that are listed now.

    A sidecar's own list may keep a host for a few seconds after it was lost.
    """
    face = Face(_host_grids, _host_line, _hosts_json)
    show(config, face, as_json=as_json, watch=watch, interval_s=interval_s)


def _host_grids(view: JobView) -> list[Grid]:
    rows = tuple(
        (host.token, str(host.slots), member.name, member.address, member.node)
        for host, member in view.hosts()
    )
    return [Grid(view.listing.reason, ("HOST", "SLOTS", "MEMBER", "ADDRESS", "NODE"), rows)]


def _host_line(view: JobView) -> str:
    return " ".join(f"{host.token}:{host.slots}" for host, _ in view.hosts()) or "(no host)"


def _hosts_json(view: JobView) -> object:
    return {
        "hosts": [
            {
                "host": host.token,
                "slots": host.slots,
                "member": member.name,
                "address": member.address,
                "node": member.node,
            }
            for host, member in view.hosts()
        ],
    }
