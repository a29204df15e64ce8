# SPDX-License-Identifier: Apache-2.0
"""``muster delete``: all ranks of a job save, then its objects and its pods go."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import click

from console.help import Command
from console.options import job_names, read_option
from console.remote.pods import (
    ClusterOptions,
    JobPod,
    cluster,
    pods_of,
    through_the_api_server,
    with_right,
)
from console.remote.sidecar import ask, harmless
from console.styling import note
from console.submit.manifest import MADE_BY, SUBMIT, WORKERS, state
from controller.cluster import paths
from controller.cluster.api import NOT_FOUND, ClusterApi, Object
from launcher_shim.exit_status import EXIT_DONE
from launcher_shim.pod.launchers import CENTRAL
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable, ConfigError, JobNotFound
from rdzv.sentences import counted
from rdzv.settings import duration_s

LOOK_S = 1.0
STATUS_TIMEOUT_S = 20.0
NOW_GRACE_S = 1
"""The grace of a pod with ``--now``, as of ``kubectl delete --now``: the kubelet ends it all the
same, so none is left behind that nobody sees."""

_RESUMED, _UNSAVED = 4, 6
"""Exit statuses of ``muster pause --wait``."""
_MAKERS = (("batch/v1", "Job", ""), ("kubeflow.org/v1", "MPIJob", ""))


@dataclass(frozen=True, slots=True)
class JobObject:
    """An object to delete: its kind and name, its API path, and the object itself."""

    kind: str
    name: str
    path: str
    found: Object

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def is_submitted(self) -> bool:
        """Whether ``muster submit`` has made it."""
        return (self.found["metadata"].get("labels") or {}).get(MADE_BY) == SUBMIT

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it trains any more."""
        return state(self.found) in ("complete", "failed")


@click.command(
    "delete",
    cls=Command,
    statuses={
        66: "there is no such job",
        69: "no save, or the API server refuses or does not answer: the job is still there",
    },
    epilog="""\
What stays: volumes with their checkpoints, and the records in the store. A job that is submitted
again under this name goes on from the checkpoints that its script finds.

\b
Examples:
  muster delete digits
  muster delete digits --now --yes
""",
    help=f"""\
Delete JOB: all ranks save the same step, then its pods go.

It deletes what has made the pods: a Job, Deployment, StatefulSet, PyTorchJob, MPIJob, or bare
pods. A Job is paused first, however long its save takes. Pods of other objects, and those of a
{CENTRAL.name}, save within their grace.
""",
)
@click.argument("job", metavar="JOB", shell_complete=job_names)
@click.option("--now", is_flag=True, help="Don't save first: what was not saved is lost.")
@click.option(
    "--timeout",
    "timeout_text",
    default="10m",
    show_default=True,
    metavar="TIME",
    help="How long the save may take, and then the end of the pods.",
)
@click.option(
    "-y", "--yes", is_flag=True, help="Don't ask before objects go that submit has not made."
)
@through_the_api_server
def delete(options: ClusterOptions, job: str, now: bool, timeout_text: str, yes: bool) -> int:
    """Delete a job; return the exit status."""
    timeout_s = read_option("--timeout", duration_s(1, 86_400), timeout_text)
    asyncio.run(delete_job(options, job, now=now, timeout_s=timeout_s, yes=yes))
    return EXIT_DONE


async def delete_job(
    options: ClusterOptions, job: str, *, now: bool, timeout_s: float, yes: bool
) -> None:
    """Save and delete a job, and print what came of it.

    Raises ``JobNotFound``, ``ConfigError`` if a person has to agree, and ``ClusterError``.
    """
    async with cluster(options) as api:
        namespace = api.namespace
        pods = await pods_of(api, namespace, job)
        targets = await _targets(api, namespace, job, pods)
        if not targets:
            raise JobNotFound(
                f"there is no job {job} in namespace {namespace}: no pod is of it, and no object"
                " of that name; muster list shows the jobs"
            )
        if not yes:
            _confirm(targets, len(pods))
        for one in targets:  # so that no job is paused that may not be deleted
            await api.delete(f"{one.path}?dryRun=All")
        ended = all(one.has_ended for one in targets)
        if not (ended or now):
            await _save(api, job, pods, targets, timeout_s)
        lost = await _lost(api, job, pods) if now and not ended else ""
        for one in targets:
            await _remove(api, f"{one.path}?propagationPolicy=Foreground")
        if now:
            for pod in pods:
                path = paths.core(namespace, "pods", pod.name)
                await _remove(api, f"{path}?gracePeriodSeconds={NOW_GRACE_S}")
        await _until_gone(api, namespace, job, targets, timeout_s)
        click.echo(f"deleted {', '.join(map(str, targets))}, with {counted(len(pods), 'pod')}")
        if lost:
            click.echo(lost)
        click.echo(f"what stays: {', '.join(stays(targets))}")


async def _targets(
    api: ClusterApi, namespace: str, job: str, pods: Sequence[JobPod]
) -> list[JobObject]:
    """Return what has made the job's pods, or what submit has made of its name."""
    paths_by_name: dict[tuple[str, str], str] = {}
    for pod in pods:
        owner = pod.owner
        if owner is None:
            paths_by_name["Pod", pod.name] = paths.core(namespace, "pods", pod.name)
            continue
        path = paths.owner(owner.api_version, owner.kind, namespace, owner.name)
        if path is None:
            raise ConfigError(
                f"the pods of job {job} are of {owner.kind} {owner.name}, a kind that muster"
                f" delete does not know: muster pause {job} --wait saves, then delete it by kubectl"
            )
        paths_by_name[owner.kind, owner.name] = path
    of_submit = [*_MAKERS, ("apps/v1", "StatefulSet", f"-{WORKERS}")]
    submitted = {
        (kind, job + suffix): paths.owner(version, kind, namespace, job + suffix)
        for version, kind, suffix in of_submit
    }
    found = []
    for (kind, name), path in {**submitted, **paths_by_name}.items():
        if path is None:
            continue
        try:
            target = JobObject(kind, name, path, await api.get(path))
        except ClusterRefused as error:
            if error.status == NOT_FOUND or (kind, name) not in paths_by_name:
                continue
            raise
        if (kind, name) in paths_by_name or target.is_submitted:
            found.append(target)
    return found


def is_terminal() -> bool:
    """Return whether a person can answer."""
    return sys.stdin.isatty()


def _confirm(targets: Sequence[JobObject], pods: int) -> None:
    """Ask before objects go that submit has not made; raises ``ConfigError`` without a terminal."""
    others = ", ".join(str(one) for one in targets if not one.is_submitted)
    if not others:
        return
    sentence = f"muster submit has not made {others}"
    if not is_terminal():
        raise ConfigError(f"{sentence}: --yes deletes it, with {counted(pods, 'pod')}")
    click.confirm(f"{sentence}. Delete it, with {counted(pods, 'pod')}?", abort=True, err=True)


async def _save(
    api: ClusterApi,
    job: str,
    pods: Sequence[JobPod],
    targets: Sequence[JobObject],
    timeout_s: float,
) -> None:
    """Let all ranks save, or say that the pods save as they end.

    Raises ``ClusterUnavailable`` if the job does not pause in time, or is resumed.
    """
    # A pause is bound to the UID of a Job; a Deployment that is made again would begin paused.
    if {one.kind for one in targets} != {"Job"}:
        note("its pods save as they end, within their grace")
        return
    if not any(pod.sidecar_runs for pod in pods):
        note("no sidecar runs: there is nothing to save")
        return
    stays = f"job {job} is not deleted; --now deletes it without a save"
    said: list[str] = []

    def wrote(is_stderr: bool, text: str) -> None:
        said.append(text)
        click.echo(harmless(text), nl=False, err=is_stderr)

    argv = ["pause", job, "--wait", "--reason", "muster delete"]
    try:
        with with_right("muster delete", "create pods/exec", api.namespace):
            ran = await ask(api, pods, argv, timeout_s=timeout_s, wrote=wrote)
    except ClusterUnavailable as error:
        raise ClusterUnavailable(
            f"{error}\n{stays}; it may be paused: muster resume {job} lets it train on"
        ) from error
    if ran.status == _UNSAVED:
        return
    if ran.status == _RESUMED:
        raise ClusterUnavailable(f"job {job} was resumed meanwhile: {stays}")
    if ran.status and "cannot be paused" in "".join(said):
        note("its pods save as they end, within their grace")
    elif ran.status:
        raise ClusterUnavailable(f"the save ended with {ran.status}: {stays}")


async def _lost(api: ClusterApi, job: str, pods: Sequence[JobPod]) -> str:
    """Return a sentence on the steps that go with a job that is not saved."""
    try:
        ran = await ask(api, pods, ["status", job, "--json"], timeout_s=STATUS_TIMEOUT_S)
    except ClusterError as error:
        return f"what is lost is not known: {error}"
    if ran.status:
        return f"what is lost is not known: {ran.err.strip()}"
    try:
        return lost_steps(json.loads(ran.out.splitlines()[0])["last_save"])
    except (ValueError, KeyError, IndexError, TypeError):
        return "what is lost is not known: what the sidecar says is no status"


def lost_steps(last_save: dict[str, Any] | None) -> str:
    """Return a sentence on the steps since the last save, as ``muster status --json`` has it."""
    step = None if last_save is None else last_save["step_of_all_ranks"]
    since = "no save is known" if step is None else f"the last save is of step {step:,}"
    if last_save is None or last_save["steps_at_risk"] is None:
        return f"what is lost is not known, as no step is reported yet; {since}"
    return f"lost: {counted(last_save['steps_at_risk'], 'step')}; {since}"


async def _remove(api: ClusterApi, path: str) -> None:
    """Delete an object; that it is gone already is as good."""
    try:
        await api.delete(path)
    except ClusterRefused as error:
        if error.status != NOT_FOUND:
            raise


async def _until_gone(
    api: ClusterApi, namespace: str, job: str, targets: Sequence[JobObject], timeout_s: float
) -> None:
    """Wait until objects and pods are gone; raises ``ClusterUnavailable`` if they are not."""
    ends_s = monotonic() + timeout_s
    while True:
        left = [str(one) for one in targets if await _is_there(api, one.path)]
        left += [f"pod {pod.name}" for pod in await pods_of(api, namespace, job)]
        if not left:
            return
        if monotonic() >= ends_s:
            raise ClusterUnavailable(
                f"job {job} is being deleted, but is not gone after {timeout_s:g} s:"
                f" {', '.join(left)}"
            )
        await asyncio.sleep(LOOK_S)


async def _is_there(api: ClusterApi, path: str) -> bool:
    try:
        await api.get(path)
    except ClusterRefused as error:
        if error.status == NOT_FOUND:
            return False
        raise
    return True


def stays(targets: Sequence[JobObject]) -> list[str]:
    """Return what the deletion leaves: the claims of the pods, and the records in the store."""
    claims = dict.fromkeys(claim for one in targets for claim in _claims(one.found))
    return [*(f"claim {claim}" for claim in claims), "the job's records in the store"]


def _claims(part: Any) -> Iterator[str]:
    """Yield the name of every claim that an object mentions, wherever its pod templates are."""
    if isinstance(part, dict):
        claim = part.get("persistentVolumeClaim")
        if isinstance(claim, dict) and "claimName" in claim:
            yield str(claim["claimName"])
        for value in part.values():
            yield from _claims(value)
    elif isinstance(part, list):
        for value in part:
            yield from _claims(value)
