# SPDX-License-Identifier: Apache-2.0
"""A job that is scaled: what the API server and a sidecar say of it, and the writes to both.

With the options, output and claims that ``muster scaleout`` and ``muster scalein`` share.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time
from typing import Any

import click

from agent.telemetry.logs import printable
from agent.verdict.view import moment
from console.job.changing import requester
from console.job.rows import UNREADABLE
from console.options import read_option
from console.remote.pods import (
    ClusterOptions,
    JobPod,
    pods_of,
    through_the_api_server,
)
from console.remote.scaled_owner import (
    GRACE_S,
    OperationClaim,
    ScaledOwner,
    ScaledPod,
    claim_of,
    claim_patch,
    claim_refusal,
    joined,
    scaled_owner,
    scaled_pod,
)
from console.remote.scaling_plan import COST
from console.remote.sidecar import ask, last_object
from console.styling import note
from console.whereabouts import found_running
from controller.cluster import paths
from controller.cluster.api import CONFLICT, NOT_FOUND, ClusterApi
from controller.cluster.executed import Ran, Wrote
from launcher_shim.exit_status import EXIT_DONE
from rdzv.errors import (
    ClusterError,
    ClusterRefused,
    ClusterUnavailable,
    ConfigError,
    JobNotFound,
    MusterError,
)
from rdzv.records.policy import JobPolicy
from rdzv.settings import count as count_of
from rdzv.settings import duration_s

ScalingCommand = Callable[..., Any]

POLL_S = 1.0
"""Interval at which the job is looked at. Shorter: more commands in its sidecars."""

NUMBER = count_of(1, 100_000)
"""Parses a number of pods."""

ASK_TIMEOUT_S = 60.0
"""Timeout of a command in a sidecar that only reads or writes the store."""

WRITE_TRIES = 10
"""Attempts of a write by compare: an owner's status is written at any time, and each write counts.
"""


DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of a pod: a ReplicaSet takes the pods with the lowest number first."""


def scaling(
    *, count: str, timeout: str, dry_run: str
) -> Callable[[ScalingCommand], ScalingCommand]:
    """Return a decorator that gives a command JOB, the cluster, and what both commands take.

    ``count``, ``timeout`` and ``dry_run``: the help of the options. The command gets ``count``, or
    None, as a number, and ``timeout_s``.
    """
    shared = (
        click.argument("job", metavar="JOB"),
        through_the_api_server,
        click.option("--count", metavar="N", help=count),
        click.option("--timeout", metavar="TIME", default="10m", show_default=True, help=timeout),
        click.option("--dry-run", is_flag=True, help=dry_run),
    )

    def decorate(command: ScalingCommand) -> ScalingCommand:
        @functools.wraps(command)
        def parsed(count: str | None, timeout: str, **arguments: Any) -> Any:
            _refuse_local(arguments["job"], arguments["options"])
            limit_s = read_option("--timeout", duration_s(1, 86_400), timeout)
            pods = None if count is None else read_option("--count", NUMBER, count)
            return command(count=pods, timeout_s=limit_s, **arguments)

        return functools.reduce(lambda made, add: add(made), reversed(shared), parsed)

    return decorate


def _refuse_local(job: str, options: ClusterOptions) -> None:
    """Raise ``ConfigError`` for a job that ``muster local`` runs here: it has no owner to scale."""
    named = {"job": job, "namespace": options.namespace}
    if not (options.kubeconfig or options.context) and found_running(named, os.environ) is not None:
        raise ConfigError(
            f"muster local runs job {job} here, and its nodes have no owner: muster drain NODE"
            " takes one out after a save, and muster local --event=add@... plans one more"
        )


def new_claim(what: str, timeout_s: float) -> OperationClaim:
    """Return the claim of an operation of this process that begins now."""
    until_unix_s = time() + timeout_s + GRACE_S
    return OperationClaim(what, requester(), until_unix_s, secrets.token_hex(8))


def say(text: str) -> None:
    """Print one line as it happens."""
    click.echo(printable(text))


class InUse(MusterError):
    """Another operation runs on the job, or has changed its count."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A job at one moment.

    ``sizes``: None if no sidecar answers; ``silent`` says why. ``held``: the claim at its owner.
    ``central``: a launcher is a member, so only ranks that report show that pods train.
    """

    owner: ScaledOwner
    pods: tuple[ScaledPod, ...]
    sizes: JobPolicy | None = None
    paused: bool = False
    held: OperationClaim | None = None
    silent: str = ""
    central: bool = False


class ScaledJob:
    """One job of a namespace, through the API server."""

    def __init__(self, api: ClusterApi, name: str) -> None:
        self.name = name
        self._api = api

    async def look(self) -> Scene:
        """Return the job as it is now; raises ``JobNotFound`` without a pod, ``ConfigError``."""
        seen = await pods_of(self._api, self._api.namespace, self.name)
        if not seen:
            raise JobNotFound(
                f"job {self.name} has no pod in namespace {self._api.namespace}, which would name"
                " its owner: kubectl scale changes that; muster list shows the jobs"
            )
        newest = seen[-1].owner
        path = None
        if newest is not None:
            version, namespace = newest.api_version, self._api.namespace
            path = paths.owner(version, newest.kind, namespace, newest.name)
        read = await self._api.get(path) if path else {}
        owner = scaled_owner(newest, path, read)
        status: dict[str, Any] = {}
        silent = ""
        try:
            ran = await self.ran("status", "--json", seen=seen)
            if ran.status == EXIT_DONE:
                status = last_object(ran.out) or {}
                silent = "" if status else UNREADABLE
            else:
                silent = last_line(ran)
        except ClusterUnavailable as error:
            silent = str(error)
        members = status.get("members") or []
        return Scene(
            owner,
            joined(map(scaled_pod, seen), owner, members),
            _sizes(status),
            bool(status.get("paused")),
            claim_of(read),
            silent,
            central=any(one.get("role") == "launcher" for one in members),
        )

    async def seen(self) -> Scene | None:
        """Return the job as it is now; None, with a remark, if the API server does not answer."""
        try:
            return await self.look()
        except ClusterUnavailable as error:
            note(str(error))
            return None

    async def ran(
        self,
        *argv: str,
        first: str = "",
        seen: Sequence[JobPod] = (),
        timeout_s: float = ASK_TIMEOUT_S,
        wrote: Wrote | None = None,
    ) -> Ran:
        """Run ``muster ARGV`` in a sidecar that answers, that of pod ``first`` if it does.

        ``seen``: the job's pods, if they were just read. Raises ``ClusterError``.
        """
        seen = seen or await pods_of(self._api, self._api.namespace, self.name)
        seen = sorted(seen, key=lambda one: one.name != first)
        return await ask(self._api, seen, argv, timeout_s=timeout_s, wrote=wrote)

    async def drained(self, pod: ScaledPod, reason: str, deadline_s: float, wrote: Wrote) -> int:
        """Drain a pod until the end of it; return the exit status of ``muster drain``."""
        words = ("drain", pod.name, "--wait", "--reason", reason, "--deadline", f"{deadline_s:.0f}")
        # Its own sidecar first: each command takes memory beside the sidecar that it runs with.
        limit_s = deadline_s + ASK_TIMEOUT_S
        ran = await self.ran(*words, first=pod.name, timeout_s=limit_s, wrote=wrote)
        return ran.status

    async def set_values(self, *, most: int | None = None, desired: int) -> str:
        """Set the job's max, if given, and the nodes that a new world waits for.

        Returns why the store did not take it; empty if it did.
        """
        raised = [] if most is None else ["--max", str(most)]
        try:
            ran = await self.ran("set", *raised, "--desired", str(desired))
        except ClusterUnavailable as error:
            return str(error)
        return "" if ran.status == EXIT_DONE else last_line(ran)

    async def try_scale(self, owner: ScaledOwner, count: int) -> None:
        """Ask whether the API server would take the count; raises ``ClusterRefused`` if not."""
        path, body = owner.change(count)
        await self._api.merge(f"{path}?dryRun=All", body)

    async def scale(self, owner: ScaledOwner, count: int) -> None:
        """Write the owner's count if it is still that of ``owner``; else raise ``InUse``."""

        def change(read: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
            now = owner.count_in(read)
            if now == count:  # a write whose answer was lost may have been done
                return None
            if now != owner.count:
                raise InUse(f"the count of {owner} was changed from {owner.count} to {now}")
            return owner.change(count)

        await self._compared(owner, change)

    async def check_count(self, owner: ScaledOwner) -> None:
        """Raise ``InUse`` if the owner's count is no longer what was decided on."""
        now = (await self.look()).owner.count
        if now != owner.count:
            raise InUse(f"the count of {owner} was changed from {owner.count} to {now}")

    async def mark(self, pods: Sequence[ScaledPod], before: dict[str, str | None]) -> None:
        """Give pods that are there the lowest deletion cost; ``before`` gets what each had."""
        for pod in pods:
            try:
                read = await self._api.get(self._pod(pod.name))
                before[pod.name] = (read["metadata"].get("annotations") or {}).get(DELETION_COST)
                await self._annotate(pod.name, str(COST))
            except ClusterRefused as error:
                if error.status != NOT_FOUND:
                    raise  # one that has gone meanwhile needs no mark

    async def unmark(self, before: dict[str, str | None]) -> None:
        """Give pods the deletion cost back that they had; those that are gone are left out.

        Raises the first error once all were tried.
        """
        failed: list[ClusterError] = []
        for name, cost in before.items():
            try:
                await self._annotate(name, cost)
            except ClusterError as error:
                if not (isinstance(error, ClusterRefused) and error.status == NOT_FOUND):
                    failed.append(error)
        if failed:
            raise failed[0]

    @asynccontextmanager
    async def claimed(self, owner: ScaledOwner, claim: OperationClaim) -> AsyncIterator[None]:
        """Hold the claim within the context; raises ``InUse`` if another operation has it."""
        await self.write_claim(owner, claim)
        try:
            yield
        finally:
            try:
                await self._write(owner, claim.token, None)
            except ClusterError as error:  # what was done stays done
                until = moment(claim.until_unix_s)
                note(f"{owner} takes no other operation until {until}: {error}")

    async def write_claim(self, owner: ScaledOwner, claim: OperationClaim) -> None:
        """Write or change the claim; raises ``InUse`` if another operation has it."""
        await self._write(owner, claim.token, claim)

    async def _write(self, owner: ScaledOwner, token: str, claim: OperationClaim | None) -> None:
        def change(read: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
            held = claim_of(read)
            ours = held is not None and held.token == token
            if claim is None and not ours:
                return None  # another one has taken it over, or it is gone
            if claim is not None and not ours and (why := claim_refusal(held, time())):
                raise InUse(f"{owner} is in use: {why}")
            return owner.path, claim_patch(claim)

        await self._compared(owner, change)

    async def _compared(
        self,
        owner: ScaledOwner,
        change: Callable[[dict[str, Any]], tuple[str, dict[str, Any]] | None],
    ) -> None:
        """Write the patch that ``change`` makes of the object, if it stays as read; else again.

        ``change`` returns the patch with its path, or None for none.
        """
        for _ in range(WRITE_TRIES):
            read = await self._api.get(owner.path)
            if (patch := change(read)) is None:
                return
            path, body = patch
            version = {"resourceVersion": str(read["metadata"]["resourceVersion"])}
            metadata = {**body.get("metadata", {}), **version}
            try:
                await self._api.merge(path, {**body, "metadata": metadata})
            except ClusterRefused as error:
                if error.status != CONFLICT:
                    raise
                await asyncio.sleep(0.1)
                continue
            return
        raise ClusterUnavailable(f"{owner} changes all the time: {WRITE_TRIES} writes were late")

    async def _annotate(self, name: str, cost: str | None) -> None:
        body = {"metadata": {"annotations": {DELETION_COST: cost}}}
        await self._api.merge(self._pod(name), body)

    def _pod(self, name: str) -> str:
        return paths.core(self._api.namespace, "pods", name)


def last_line(ran: Ran) -> str:
    """Return what a command said last, without its prefix."""
    lines = (ran.err or ran.out).strip().splitlines()
    last = lines[-1].removeprefix("muster: ") if lines else ""
    return last or f"it ended with {ran.status}"


def _sizes(status: dict[str, Any]) -> JobPolicy | None:
    least, most = status.get("min"), status.get("max")
    if type(least) is not int or type(most) is not int:
        return None
    return JobPolicy(least, most, tuple(status.get("sizes") or ()), status.get("unit") or 1)
