# SPDX-License-Identifier: Apache-2.0
"""A command about a job in a cluster: the same command, run in a sidecar of the job.

There the store is known, and what it prints is shown here as it comes. Kubernetes' own rights
decide who may.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

import click
from click.core import ParameterSource

from agent.job_config import STORE_SETTINGS
from console.help import near
from console.job.jobs import JobTable, pod_grid
from console.job.output import print_grids
from console.job.rows import beside, job_line, pod_lines
from console.remote.pods import JobPod, cluster, jobs_in, pod_named, pods_of, with_right
from console.remote.sidecar import (
    AGAIN_S,
    Lines,
    ReaderGone,
    ShownOutput,
    able,
    ask_one,
    environment,
    harmless,
    last_object,
)
from console.styling import note
from console.whereabouts import ClusterOptions
from controller.cluster.api import ClusterApi
from controller.cluster.executed import Ran
from launcher_shim.exit_status import (
    EXIT_BROKEN_PIPE,
    EXIT_DONE,
    EXIT_KILLED,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from rdzv.errors import ClusterUnavailable, ConfigError, JobNotFound
from rdzv.reconcile import first_of

ANSWER_S = 120.0
"""Timeout of a command that follows nothing."""

GIVE_UP_S = 120.0
"""If the pod that gives a view goes, others are asked for so long."""

VIEWS = frozenset({"status", "hosts", "history", "doctor"})
"""Commands that write nothing: they may be run again in another pod."""

REDRAWN = frozenset({"status", "hosts"})
"""Views that are drawn over and over in the window, if there is one."""

WINDOW_LOOK_S, PODS_LOOK_S = 0.5, 5.0
"""Intervals at which the size of the window, and the pods that do not run, are looked at."""

HERE = frozenset({*STORE_SETTINGS, "kubeconfig", "context", "namespace", "job", "named"})
"""Parameters that are for this side: a sidecar has its own job, namespace and store."""

UNKNOWN_WORDS = ("No such option", "there is no command", "No such command", "unexpected extra")
"""Words of click and Muster about an option or a command that a version does not have."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A command to run elsewhere: its words, without those that are for this side.

    ``member``: the pod that it is about; empty for none. ``follows``: it may take any time.
    """

    verb: str
    words: tuple[str, ...]
    member: str = ""
    follows: bool = False
    as_json: bool = False

    @property
    def is_view(self) -> bool:
        """Whether it writes nothing."""
        return self.verb in VIEWS


def in_a_sidecar(options: ClusterOptions, job: str | None) -> int:
    """Run the present command in a sidecar of the job; return its exit status.

    Raises ``ConfigError`` without a job, ``JobNotFound`` if it has no pods, ``ClusterError``.
    """
    passed = passed_on(click.get_current_context())
    job = job or os.environ.get("MUSTER_JOB")
    return asyncio.run(_pass_on(options, job, passed))


def passed_on(ctx: click.Context) -> Passed:
    """Return the command of ``ctx`` as it was typed, without what is for this side."""
    verb, params = str(ctx.command.name), ctx.params
    return Passed(
        verb,
        (verb, *_words(ctx, HERE)),
        member=str(params.get("member") or ""),
        follows=bool(params.get("watch") or params.get("wait")),
        as_json=bool(params.get("as_json") or params.get("form") == "json"),
    )


def _words(ctx: click.Context, left_out: Collection[str]) -> list[str]:
    options, arguments = [], []
    for one in ctx.command.params:
        typed = ctx.get_parameter_source(one.name or "") is ParameterSource.COMMANDLINE
        value: Any = ctx.params.get(one.name or "")
        if not typed or one.name in left_out:
            continue
        if isinstance(one, click.Argument):
            arguments += list(value) if isinstance(value, tuple) else [value]
        elif isinstance(one, click.Option) and one.is_flag:
            names = one.opts if value else one.secondary_opts
            options.append(max(names, key=len))
        else:
            values = value if isinstance(value, tuple) else (value,)
            options += [word for each in values for word in (max(one.opts, key=len), str(each))]
    return [*options, *(["--", *map(str, arguments)] if arguments else [])]


async def _pass_on(options: ClusterOptions, job: str | None, passed: Passed) -> int:
    async with cluster(options) as api:
        with with_right(f"muster {passed.verb}", "list pods", api.namespace):
            name = job or await _job_of(api, passed.member)
            pods = await pods_of(api, api.namespace, name)
            if not pods:
                raise await no_job(api, name)
        if not able(pods):
            return _without_sidecar(passed, name, pods)
        with with_right(f"muster {passed.verb}", "create pods/exec", api.namespace):
            return await _Passing(api, name, passed).run(pods)


async def _job_of(api: ClusterApi, member: str) -> str:
    """Return the job of a pod; raises ``ConfigError`` if it has none."""
    if member and (found := await pod_named(api, api.namespace, member)) is not None and found.job:
        return found.job
    known = sorted(name for _, name in await jobs_in(api, api.namespace))
    there = f"namespace {api.namespace} has {', '.join(known)}" if known else "muster list -A"
    raise ConfigError(f"no job is named: {there}")


async def no_job(api: ClusterApi, job: str) -> JobNotFound:
    """Return the error for a job without pods, with the name that may be meant."""
    known = [name for _, name in await jobs_in(api, api.namespace)]
    hint = "see muster list -A, or name its namespace by -n"
    if close := near(job, known):
        hint = f"did you mean {close}?"
    elif known:
        hint = f"it has {', '.join(sorted(known)[:5])}"
    return JobNotFound(f"namespace {api.namespace} has no pod of a job {job}: {hint}")


def _without_sidecar(passed: Passed, job: str, pods: Sequence[JobPod]) -> int:
    """Show what the API server alone knows of a job none of whose sidecars runs.

    Raises ``ClusterUnavailable`` for a command that needs the store.
    """
    trouble = "no pod has a running sidecar"
    line = job_line(
        pods[0].namespace, job, None, [one.facts for one in pods], time(), trouble=trouble
    )
    if passed.verb not in ("status", "doctor"):
        why = line.why or f"it is {line.phase}"
        raise ClusterUnavailable(
            f"muster {passed.verb} needs a running sidecar of job {job}, and there is none: {why}"
        )
    JobTable("json" if passed.as_json else "table", one=True).show([line])
    return EXIT_DONE


@dataclass(slots=True)
class _Passing:
    """The run of one command in one sidecar after the other."""

    api: ClusterApi
    job: str
    passed: Passed

    async def run(self, pods: Sequence[JobPod]) -> int:
        """Run it; return the exit status."""
        views = self.passed.is_view
        whole = self.passed.verb == "status" and self.passed.as_json and not self.passed.follows
        output = ShownOutput(whole, history=self.passed.verb == "history" and self.passed.follows)
        silent_s = 0.0
        while True:
            try:
                pod, ran = await self._up_to_date(pods, output)
            except ReaderGone:
                return EXIT_BROKEN_PIPE
            except ClusterUnavailable:
                if not (self.passed.follows and views and output.began) or silent_s >= GIVE_UP_S:
                    raise
                silent_s += AGAIN_S
                await asyncio.sleep(AGAIN_S)
                pods = await pods_of(self.api, self.api.namespace, self.job)
                continue
            silent_s = 0.0
            if ran.status in (EXIT_KILLED, EXIT_TERMINATED):
                pods = await pods_of(self.api, self.api.namespace, self.job)
                there = any(one.uid == pod.uid and not one.deleting for one in able(pods))
                if not there and self.passed.follows and views:
                    continue
                self._say_killed(pod, there=there)
                return ran.status
            return self._ended(pod, ran, output, pods)

    async def _up_to_date(self, pods: Sequence[JobPod], output: ShownOutput) -> tuple[JobPod, Ran]:
        """Run it as ``_in_one``; again if the window, or the pods that do not run, change."""
        environ = environment()
        if not (self.passed.follows and self.passed.verb in REDRAWN):
            return await self._in_one(pods, output, environ)
        while True:
            environ = {**environment(), **beside(one.facts for one in pods)}
            running = asyncio.create_task(self._in_one(pods, output, environ), name="view")
            news = await first_of(running, self._changed(pods, environ))
            if not running.cancelled():
                return running.result()
            pods = news
            if "COLUMNS" in environ:
                click.clear()  # what it has drawn does not fit

    async def _changed(
        self, pods: Sequence[JobPod], environ: Mapping[str, str]
    ) -> Sequence[JobPod]:
        """Wait until the view was made for other surroundings; return the pods as they are then."""
        looked_s = monotonic()
        while True:
            await asyncio.sleep(WINDOW_LOOK_S)
            if monotonic() - looked_s >= PODS_LOOK_S:
                looked_s = monotonic()
                with suppress(ClusterUnavailable):  # the view says what goes on
                    pods = await pods_of(self.api, self.api.namespace, self.job)
            if {**environment(), **beside(one.facts for one in pods)} != environ:
                return pods

    async def _in_one(
        self, pods: Sequence[JobPod], output: ShownOutput, environ: Mapping[str, str]
    ) -> tuple[JobPod, Ran]:
        """Run it in the first pod that answers; raises ``ClusterUnavailable`` if none does."""
        failures = []
        for pod in able(pods, last=self.passed.member):
            output.lines = Lines()
            try:
                return pod, await ask_one(
                    self.api,
                    pod,
                    self.passed.words,
                    timeout_s=None if self.passed.follows else ANSWER_S,
                    wrote=output.take,
                    environ=environ,
                )
            except ClusterUnavailable as error:
                if output.began and not (self.passed.is_view and self.passed.follows):
                    left = f"; what it has done is unknown: see muster status {self.job}"
                    raise ClusterUnavailable(
                        f"the connection to the sidecar of pod {pod.name} broke off: {error}{left}"
                    ) from error
                failures.append(f"{pod.name}: {error}")
        why = "; ".join(failures) or "none runs"
        raise ClusterUnavailable(f"no sidecar of job {self.job} answers: {why}")

    def _ended(self, pod: JobPod, ran: Ran, output: ShownOutput, pods: Sequence[JobPod]) -> int:
        if ran.status == EXIT_USAGE and any(word in output.err for word in UNKNOWN_WORDS):
            note(
                f"pod {pod.name} has a sidecar of the image {pod.image}, whose muster does not have"
                f" this: yours may be newer. See docs/upgrading.md, or name the store by"
                f" --etcd-endpoints"
            )
        idle = [one.facts for one in pods if not one.sidecar_runs]
        if output.whole and ran.status == EXIT_DONE:
            status = _status_in(output.out, pod)
            more = [line.as_json() for line in pod_lines(None, idle, time())]
            click.echo(json.dumps({**status, "not_running": more}))
        elif output.whole:
            click.echo(harmless(output.out), nl=False)
        elif self.passed.verb == "status" and not self.passed.follows and idle:
            lines = pod_lines(None, idle, time())
            click.echo()
            print_grids([pod_grid(lines, wide=False)], sys.stdout)
        return ran.status

    def _say_killed(self, pod: JobPod, *, there: bool) -> None:
        if there:
            note(
                f"the command was killed in pod {pod.name}: its sidecar may have too little memory"
                " (muster.dev/resources)"
            )
        else:
            note(f"pod {pod.name} went while the command ran there: see muster status {self.job}")


def _status_in(text: str, pod: JobPod) -> dict[str, Any]:
    if (found := last_object(text)) is None:
        raise ClusterUnavailable(f"what the sidecar of pod {pod.name} says is no status")
    return found
