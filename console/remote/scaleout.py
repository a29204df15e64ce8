# SPDX-License-Identifier: Apache-2.0
"""``muster scaleout``: more pods by a time-out, or those that came, or all as it was."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from time import monotonic

import click

from console.help import Command
from console.options import read_option
from console.remote.pods import ClusterOptions, cluster
from console.remote.scaled_job import (
    NUMBER,
    POLL_S,
    InUse,
    ScaledJob,
    Scene,
    new_claim,
    say,
    scaling,
)
from console.remote.scaled_owner import OperationClaim, ScaledPod
from console.remote.scaling_plan import (
    Came,
    ScaleOutPlan,
    arrival,
    came,
    hosts,
    waiting,
    withdrawn,
)
from console.styling import note
from launcher_shim.exit_status import EXIT_DONE
from rdzv.errors import ConfigError, MusterError
from rdzv.sentences import counted, duration

PARTLY, ROLLED_BACK, IN_USE = 3, 4, 5

GONE_S = 60.0
"""Time for withdrawn pods to leave the job before its max is set back."""


REPORT_S = 60.0
"""Time for a central launcher's ranks to report, once all hosts are listed; others do report."""


@dataclass(frozen=True, slots=True)
class More:
    """A user's request: ``count`` more pods, or ``to`` so many; ``whole``: all or nothing."""

    count: int | None
    to: int | None
    timeout_s: float
    raises_max: bool = False
    whole: bool = False
    dry_run: bool = False


@click.command(
    cls=Command,
    statuses={
        PARTLY: "not all came in time: those that came stay, the others are withdrawn",
        ROLLED_BACK: "with --all-or-nothing: not all came in time, and it is as it was",
        IN_USE: "another operation runs on the job, or has changed its count",
    },
    epilog="""\b
Examples:
  muster scaleout digits --count 1 --timeout 10m
  muster scaleout digits --to 8 --max --all-or-nothing
""",
)
@scaling(count="Pods to add.", timeout="Time to come.", dry_run="Say what would be done, and end.")
@click.option("--to", metavar="N", help="Pods to have.")
@click.option("--max", "raises_max", is_flag=True, help="Raise the job's max if it is too low.")
@click.option(
    "--all-or-nothing", "whole", is_flag=True, help="Admit all of them together, or none."
)
def scaleout(
    options: ClusterOptions,
    job: str,
    count: int | None,
    to: str | None,
    timeout_s: float,
    raises_max: bool,
    whole: bool,
    dry_run: bool,
) -> int:
    """Add pods to JOB by its owner's own means, and wait until they train.

    Pods that take part by the time-out stay; the count becomes that of those that came. Ctrl-C
    leaves the count as asked for; with --all-or-nothing it undoes it.
    """
    pods = None if to is None else read_option("--to", NUMBER, to)
    request = More(count, pods, timeout_s, raises_max=raises_max, whole=whole, dry_run=dry_run)
    if (request.count is None) == (request.to is None):
        raise ConfigError("give either --count, the pods to add, or --to, the pods to have")

    async def run() -> int:
        async with cluster(options) as api:
            return await scale_out(ScaledJob(api, job), request)

    return asyncio.run(run())


async def scale_out(job: ScaledJob, request: More) -> int:
    """Carry out a scale-out; return the exit status. Raises ``ConfigError`` for a refusal."""
    try:
        scene = await restored(job, await job.look())
        wanted = request.to or scene.owner.count + (request.count or 0)
        found, why = arrival(scene.owner, scene.sizes, wanted, raises_max=request.raises_max)
        if found is None:
            raise ConfigError(f"job {job.name} stays as it is: {why}")
        say(_plan(scene, found, why, whole=request.whole))
        if found.count == found.before or request.dry_run:
            return EXIT_DONE
        return await _ScaleOut(job, scene, found, whole=request.whole).run(request.timeout_s)
    except InUse as error:
        note(str(error))
        return IN_USE


async def restored(job: ScaledJob, scene: Scene) -> Scene:
    """Set a max back that an operation which was cut off has lowered; return the job after it."""
    held = scene.held
    if held is None or held.most is None or scene.sizes is None:
        return scene
    claim = new_claim(f"the end of {held.what}", GONE_S)
    async with job.claimed(scene.owner, claim):
        why = await job.set_values(most=held.most, desired=_world(scene, scene.owner.count))
    note(f"{held.by} was cut off in {held.what}: max is {held.most} again{why and f'; not: {why}'}")
    return await job.look()


def _plan(scene: Scene, found: ScaleOutPlan, why: str, *, whole: bool) -> str:
    owner, added = scene.owner, found.count - found.before
    if not added:
        return f"nothing to do: {why}"
    who = counted(added, "pod") + (" comes" if added == 1 else " come")
    if owner.ordinal:
        first = owner.first + found.before - owner.fixed
        indexes = f"{first}" if added == 1 else f"{first} to {first + added - 1}"
        who += f", {'index' if added == 1 else 'indexes'} {indexes}"
    raised = f"; max becomes {found.most}" if found.most is not None else ""
    kept = "; nobody stops before all have come" if whole else ""
    return f"{owner}: {found.before} -> {found.count}: {who}{raised}{kept} ({why})"


def _world(scene: Scene, count: int) -> int:
    """Return the largest world of ``count`` pods, for which a new one waits."""
    sizes = scene.sizes
    return count if sizes is None else sizes.largest(count) or sizes.smallest


class _ScaleOut:
    """One scale-out, from its claim to its end."""

    def __init__(self, job: ScaledJob, scene: Scene, found: ScaleOutPlan, *, whole: bool) -> None:
        self._job = job
        self._scene = scene
        self._found = found
        self._whole = whole
        self._most = None if scene.sizes is None else found.most or scene.sizes.max_nodes
        self._before = {pod.uid for pod in scene.pods}

    async def run(self, timeout_s: float) -> int:
        """Add the pods, and wait for them; return the exit status."""
        until_s = monotonic() + timeout_s
        claim = new_claim(f"scaleout to {self._found.count}", timeout_s)
        owner, found = self._scene.owner, self._found
        await self._job.try_scale(owner, found.count)
        async with self._job.claimed(owner, claim):
            await self._job.check_count(owner)
            holds = self._whole and self._scene.sizes is not None
            try:
                if holds:
                    await self._hold(claim)
                else:
                    await self._let_in(found.count)
                await self._job.scale(owner, found.count)
                status = await self._until_there(until_s, holds=holds)
            except asyncio.CancelledError:
                if not self._whole:
                    note(f"the count of {owner} stays {found.count}: muster scalein undoes it")
                    raise
                await self._undo("Ctrl-C")
                raise
            except InUse:
                await self._set_back(owner.count)
                raise
            except Exception:
                if self._whole:
                    await self._undo("it could not be done")
                raise
        return status

    async def _hold(self, claim: OperationClaim) -> None:
        """Let newcomers stand by: the world that trains is full."""
        sizes = self._scene.sizes
        assert sizes is not None
        here = sum(pod.takes_part for pod in self._scene.pods)
        full = max(sizes.smallest, sizes.largest(here))
        if full < sizes.max_nodes:
            await self._job.write_claim(self._scene.owner, replace(claim, most=sizes.max_nodes))
        if why := await self._job.set_values(most=full, desired=full):
            raise ConfigError(f"newcomers cannot be kept waiting: {why}")

    async def _let_in(self, count: int) -> None:
        """Let a world of ``count`` pods form, and none wait for more."""
        sizes = self._scene.sizes
        if sizes is None or self._most is None:
            return
        room = replace(sizes, max_nodes=self._most)
        desired = room.largest(count) or room.smallest
        raised = self._most if self._whole or self._most != sizes.max_nodes else None
        if why := await self._job.set_values(most=raised, desired=desired):
            if raised is not None:
                raise ConfigError(f"max cannot be set to {raised}: {why}")
            note(f"newcomers are gathered for longer, as desired cannot be set: {why}")

    async def _until_there(self, until_s: float, *, holds: bool) -> int:
        """Wait until all pods train; return the exit status of what has come of it."""
        began_s, reported, judged = monotonic(), "", Came(self._found.before, False, False)
        known = ""
        # A script that has not reported on a host that was there before will not on new ones.
        reports = not any(pod.is_silent for pod in self._scene.pods)
        while True:
            scene = await self._job.seen()
            if scene is not None:
                if scene.owner.count != self._found.count:
                    raise InUse(f"the count of {scene.owner} was changed to {scene.owner.count}")
                judged = came(self._found, scene.pods, paused=scene.paused)
                line = f"{judged.count} of {self._found.count} take part"
                if missing := waiting(scene.pods):
                    line += f"; {missing}"
                if line != reported:
                    reported = line
                    say(line)
                if judged.complete and holds:
                    await self._let_in(self._found.count)
                    holds = False
                elif judged.trains:
                    took = duration(monotonic() - began_s)
                    say(f"{self._found.count} take part, after {took}")
                    return EXIT_DONE
                known = hosts(scene.pods, self._job.name) if scene.central else ""
                if judged.listed and known:
                    until_s = min(until_s, monotonic() + (REPORT_S if reports else 0.0))
            if monotonic() >= until_s:
                break
            await asyncio.sleep(POLL_S)
        if judged.complete:
            together = f"all {self._found.count} have come, and do not train together yet"
            say(known or f"{together}: muster why")
            return EXIT_DONE
        if self._whole:
            await self._roll_back("not all came in time")
            return ROLLED_BACK
        return await self._keep(judged)

    async def _keep(self, judged: Came) -> int:
        """Keep those that have come, and withdraw the others."""
        scene = await self._job.look()
        judged = came(self._found, scene.pods, paused=scene.paused)
        if judged.complete:
            return EXIT_DONE
        gone, what_goes = withdrawn(scene.owner, scene.pods, judged.count)
        await self._withdraw(gone, judged.count)
        await self._let_in(judged.count)
        say(f"not all came in time: {judged.count} of {self._found.count} stay; {what_goes}")
        return PARTLY

    async def _undo(self, why: str) -> None:
        """Set all back after an error or Ctrl-C; what fails is said, and hides no error."""
        try:
            await self._roll_back(why)
        except MusterError as error:
            await self._set_back(self._found.before)
            note(f"{why}, and {self._scene.owner} is not as it was: {error}")

    async def _roll_back(self, why: str) -> None:
        """Set count and bounds back as they were; raises ``InUse`` if the count is another's."""
        before = self._found.before
        scene = await self._job.seen()
        await self._withdraw(self._new(scene), before)
        until_s = monotonic() + GONE_S
        while monotonic() < until_s:
            scene = await self._job.seen()
            if scene is not None and not any(pod.takes_part for pod in self._new(scene)):
                break
            await asyncio.sleep(POLL_S)
        await self._set_back(before)
        say(f"{why}: {self._scene.owner} has {before} again")

    def _new(self, scene: Scene | None) -> list[ScaledPod]:
        pods = () if scene is None else scene.pods
        return [pod for pod in pods if pod.uid not in self._before and not pod.deleting]

    async def _withdraw(self, pods: list[ScaledPod], count: int) -> None:
        """Write a lower count; a Deployment takes these pods, any other owner the highest indexes.

        Raises ``InUse`` if the count is no longer what this operation has asked for.
        """
        marked: dict[str, str | None] = {}
        asked_for = replace(self._scene.owner, count=self._found.count)
        try:
            if not asked_for.ordinal:
                await self._job.mark(pods, marked)
            await self._job.scale(asked_for, count)
        except (MusterError, asyncio.CancelledError):
            await self._job.unmark(marked)
            raise

    async def _set_back(self, count: int) -> None:
        """Set the bounds back that newcomers were kept waiting by."""
        sizes = self._scene.sizes
        if not self._whole or sizes is None:
            return
        desired = _world(self._scene, count)
        if why := await self._job.set_values(most=sizes.max_nodes, desired=desired):
            note(f"max could not be set back to {sizes.max_nodes}: {why}; muster set --max does it")
