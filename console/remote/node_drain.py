# SPDX-License-Identifier: Apache-2.0
"""``muster drain`` in a cluster: of one pod, or of all on a node, by a sidecar of each job."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from console.job.changing import ASKED_BY, requester
from console.job.drain_command import nothing_on, show, who_leaves, worst
from console.remote.passing import (
    ANSWER_S,
    UNKNOWN_WORDS,
    in_a_sidecar,
    no_job,
)
from console.remote.pods import FORBIDDEN, JobPod, cluster, jobs_in, pods_of, with_right
from console.remote.sidecar import TAIL, Lines, ReaderGone, ask, object_in
from console.styling import note
from console.whereabouts import ClusterOptions
from controller.cluster.api import ClusterApi
from launcher_shim.exit_status import (
    EXIT_BROKEN_PIPE,
    EXIT_DONE,
    EXIT_KILLED,
    EXIT_TERMINATED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable

COMMAND = "muster drain"

NAMES = ("member", "phase", "sentence", "outcome")
"""Fields of a phase, as a sidecar prints it."""

OVER = ("Succeeded", "Failed")
"""Phases of pods that have nothing left to save."""


@dataclass(frozen=True, slots=True)
class NodeJob:
    """A job with pods on the node. ``leave``: those with a sidecar that runs; ``rest``: others.

    ``pods``: all of the job that are not over, in the order in which they are asked.
    """

    name: str
    pods: tuple[JobPod, ...]
    leave: tuple[str, ...]
    rest: tuple[str, ...]


def jobs_on(node: str, jobs: Sequence[tuple[str, Sequence[JobPod]]]) -> list[NodeJob]:
    """Return the jobs that have pods on a node; of each, pods that stay are first to be asked."""
    found = []
    for name, pods in jobs:
        live = [one for one in pods if one.phase not in OVER]
        there = [one for one in live if one.node == node]
        if there:
            order = tuple(sorted(live, key=lambda one: one.node == node))
            leave = tuple(one.name for one in there if one.sidecar_runs)
            rest = tuple(one.name for one in there if not one.sidecar_runs)
            found.append(NodeJob(name, order, leave, rest))
    return sorted(found, key=lambda one: one.name)


def in_the_cluster(options: ClusterOptions, job: str | None) -> int:
    """Run the present command, ``drain``, about a job, or about all on a node; return its status.

    Raises ``ConfigError``, ``JobNotFound`` if a job that is named has no pods, ``ClusterError``.
    """
    params = click.get_current_context().params
    if params["node"] is None:
        return in_a_sidecar(options, job)
    job = job or os.environ.get("MUSTER_JOB")
    words = ["drain", "--node", params["node"], "--deadline", params["deadline"]]
    words += ["--reason", params["reason"], "--json", *["--wait"] * params["wait"]]
    as_json = bool(params["as_json"] or params.get("form") == "json")
    return asyncio.run(_drain(options, job, params["node"], words, as_json=as_json))


async def _drain(
    options: ClusterOptions, job: str | None, node: str, words: Sequence[str], *, as_json: bool
) -> int:
    async with cluster(options) as api:
        with with_right(COMMAND, "list pods", api.namespace):
            jobs = await _jobs(api, job)
        found = jobs_on(node, jobs)
        if not found:
            whose = f"job {job}" if job else f"namespace {api.namespace}"
            others = (one.node for _, pods in jobs for one in pods)
            click.echo(nothing_on(node, whose, others), err=as_json)
            return EXIT_DONE
        for one in found:
            _say_who(one, node, as_json=as_json)
        with with_right(COMMAND, "create pods/exec", api.namespace):
            asked = [_NodeDrains(api, one, as_json) for one in found if one.leave]
            try:
                return worst(await asyncio.gather(*(one.run(words) for one in asked)))
            except ReaderGone:
                return EXIT_BROKEN_PIPE


async def _jobs(api: ClusterApi, job: str | None) -> list[tuple[str, list[JobPod]]]:
    if job is None:
        return [(name, pods) for (_, name), pods in (await jobs_in(api, api.namespace)).items()]
    pods = await pods_of(api, api.namespace, job)
    if not pods:
        raise await no_job(api, job)
    return [(job, pods)]


def _say_who(job: NodeJob, node: str, *, as_json: bool) -> None:
    if job.leave and not as_json:
        click.echo(who_leaves(job.name, job.leave, node, len(job.pods)))
    for name in job.rest:
        note(f"pod {name} of job {job.name} has no running sidecar: nothing saves for it")


@dataclass(slots=True)
class _NodeDrains:
    """The drains of one job's pods on the node, as a sidecar of the job starts and follows them."""

    api: ClusterApi
    job: NodeJob
    as_json: bool
    _reported: set[str] = field(default_factory=set)
    _lines: Lines = field(default_factory=Lines)
    _err: str = ""

    async def run(self, words: Sequence[str]) -> int:
        """Have the sidecar drain them; return its exit status."""
        follows = "--wait" in words
        try:
            ran = await ask(
                self.api,
                self.job.pods,
                words,
                timeout_s=None if follows else ANSWER_S,
                wrote=self._take,
                environ={ASKED_BY: requester()},
            )
        except ClusterError as error:
            if isinstance(error, ClusterRefused) and error.status == FORBIDDEN:
                raise
            self._say(f"{error}; what was done is unknown: see muster status {self.job.name}")
            return EXIT_UNAVAILABLE
        for line in self._err.splitlines():
            self._say(line.removeprefix("muster: "))
        if ran.status == EXIT_USAGE and any(word in self._err for word in UNKNOWN_WORDS):
            self._say(
                f"its sidecars are older and drain no node (see docs/upgrading.md): drain each of"
                f" {', '.join(self.job.leave)} by muster drain POD"
            )
        elif ran.status in (EXIT_KILLED, EXIT_TERMINATED):
            self._say(f"the command was ended in its pod: see muster status {self.job.name}")
        elif self._reported:
            for name in sorted({*self.job.leave} - self._reported):
                self._say(f"pod {name} is no member yet: it has nothing to save")
        return ran.status

    def _take(self, is_stderr: bool, text: str) -> None:
        """Print each phase as it comes."""
        if is_stderr:
            self._err = (self._err + text)[-TAIL:]
            return
        lines = filter(None, self._lines.take(text))
        for member, phase, sentence, outcome in map(phase_in, lines):
            self._reported.add(member)
            try:
                show(self.job.name, member, phase, sentence, outcome, as_json=self.as_json)
            except BrokenPipeError as error:
                raise ReaderGone from error

    def _say(self, sentence: str) -> None:
        note(f"job {self.job.name}: {sentence}")


def phase_in(line: str) -> tuple[str, str, str, str]:
    """Return the member, the phase, the sentence and the outcome that a sidecar says.

    Raises ``ClusterUnavailable`` if it says something else.
    """
    said = object_in(line) or {}
    match [said.get(name) for name in NAMES]:
        case [str(member), str(phase), str(sentence), str(outcome)]:
            return member, phase, sentence, outcome
    raise ClusterUnavailable("what its sidecar says is no phase of a drain")
