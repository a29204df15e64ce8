# SPDX-License-Identifier: Apache-2.0
"""``muster scalein``: fewer pods, each drained before its owner ends it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic

import click

from console.help import Command
from console.job.drain import STATUS as OUTCOMES
from console.remote.pods import ClusterOptions, cluster
from console.remote.scaled_job import POLL_S, InUse, ScaledJob, Scene, new_claim, say, scaling
from console.remote.scaled_owner import ScaledPod
from console.remote.scaleout import restored
from console.remote.scaling_plan import COST, ScaleInPlan, WhoLeaves, ahead_of, departure, hosts
from console.remote.sidecar import Lines
from console.styling import note
from controller.cluster.executed import Wrote
from launcher_shim.exit_status import EXIT_DONE
from rdzv.errors import ClusterError, ClusterUnavailable, ConfigError
from rdzv.sentences import counted, duration

UNSAVED, CANCELLED, IN_USE = 3, 4, 5

WENT_ON = {OUTCOMES["committed"], OUTCOMES["uncommitted"], OUTCOMES["lost"], OUTCOMES["expired"]}
"""Ends of a drain after which its pod is out of the world."""


@click.command(
    cls=Command,
    statuses={
        UNSAVED: "done, but a pod went before all ranks had saved, or is not gone yet",
        CANCELLED: "nothing was scaled: a drain was cancelled, or another pod would have gone",
        IN_USE: "another operation runs on the job, or has changed its count",
    },
    epilog="""\b
Examples:
  muster scalein digits --count 1
  muster scalein digits digits-7f6c-x2k9p --dry-run
  muster scalein digits --node gpu-17
""",
)
@scaling(
    count="Pods to take away.",
    timeout="Time to save and go.",
    dry_run="Say who would go, and end.",
)
@click.argument("pods", metavar="[POD]...", nargs=-1)
@click.option("--node", metavar="NODE", help="Take the pods on this node.")
@click.option("--spot-first", is_flag=True, help="Take pods on spot nodes first; --count of them.")
@click.option("--slowest", is_flag=True, help="Take those that wait least; --count of them.")
@click.option("--idle", is_flag=True, help="Drain only: the count stays, and the pods idle.")
def scalein(
    options: ClusterOptions,
    job: str,
    pods: tuple[str, ...],
    count: int | None,
    node: str | None,
    spot_first: bool,
    slowest: bool,
    idle: bool,
    timeout_s: float,
    dry_run: bool,
) -> int:
    """Take pods away from JOB: all ranks save, then its owner ends them.

    A StatefulSet, an Indexed Job, a PyTorchJob and an MPIJob drop the highest index: another pod is
    refused, or idles (--idle) until its drain is cancelled. A Deployment drops the pods you name.
    """
    by_count = count is not None or spot_first or slowest
    if sum((bool(pods), node is not None, by_count)) != 1 or (spot_first and slowest):
        raise ConfigError("give one of --count, names of pods, --node, --spot-first and --slowest")
    selection = WhoLeaves(count, pods, node or "", spot_first, slowest)

    async def run() -> int:
        async with cluster(options) as api:
            scaled = ScaledJob(api, job)
            return await scale_in(scaled, selection, timeout_s, idle=idle, dry_run=dry_run)

    return asyncio.run(run())


async def scale_in(
    job: ScaledJob,
    selection: WhoLeaves,
    timeout_s: float,
    *,
    idle: bool = False,
    dry_run: bool = False,
) -> int:
    """Carry out a scale-in; return the exit status. Raises ``ConfigError`` for a refusal."""
    try:
        scene = await restored(job, await job.look())
        found, why = departure(scene.owner, scene.pods, scene.sizes, selection, idle=idle)
        if found is None:
            raise ConfigError(f"job {job.name} stays as it is: {why}")
        for line in _plan(scene, found, why):
            say(line)
        if dry_run:
            return EXIT_DONE
        if found.pods and scene.sizes is None:
            raise ClusterUnavailable(f"job {job.name} stays, as nothing could save: {scene.silent}")
        return await _ScaleIn(job, scene, found).run(timeout_s)
    except InUse as error:
        note(str(error))
        return IN_USE


def _plan(scene: Scene, found: ScaleInPlan, why: str) -> list[str]:
    owner = scene.owner
    change = "" if found.count is None else f": {owner.count} -> {found.count}"
    lines = [f"{owner}{change} ({why})"]
    verb = "idles" if found.count is None else "goes"
    for pod in found.pods:
        spot = ", spot" if pod.spot else ""
        lines.append(f"{verb}  {pod.name}  {pod.described}, {pod.node or 'no node'}{spot}")
    return lines


class _ScaleIn:
    """One scale-in, from its claim to its end."""

    def __init__(self, job: ScaledJob, scene: Scene, found: ScaleInPlan) -> None:
        self._job = job
        self._scene = scene
        self._found = found
        self._names = [pod.name for pod in found.pods]
        self._drained: list[ScaledPod] = []

    async def run(self, timeout_s: float) -> int:
        """Drain, and scale; return the exit status."""
        owner, count = self._scene.owner, self._found.count
        until_s = monotonic() + timeout_s
        claim = new_claim(f"scalein of {', '.join(self._names)[:100]}", timeout_s)
        if count is not None:
            await self._job.try_scale(owner, count)
        async with self._job.claimed(owner, claim):
            await self._job.check_count(owner)
            marked: dict[str, str | None] = {}
            try:
                if count is not None and not owner.ordinal:
                    await self._job.mark(self._found.pods, marked)
                await self._want(len(self._found.pods))
                saved = await self._drain(claim.by, until_s)
                if count is None:
                    say(f"{', '.join(self._names)}: idle until muster drain POD --cancel")
                    return EXIT_DONE if saved else UNSAVED
                await self._until_first(until_s)
                await self._job.scale(owner, count)
            except (asyncio.CancelledError, Exception) as error:
                await self._undo(marked)
                if not isinstance(error, _Stopped):
                    raise
                note(f"nothing was scaled: {error}")
                return CANCELLED
            return await self._until_gone(count, until_s, saved=saved)

    async def _want(self, fewer: int) -> None:
        """Let the next world wait for no more than those that stay."""
        sizes = self._scene.sizes
        if sizes is None:
            return
        left = sum(pod.takes_part for pod in self._scene.pods if pod.name not in self._names)
        if (desired := sizes.largest(left)) and (
            why := await self._job.set_values(desired=desired)
        ):
            note(f"the next world may wait for {counted(fewer, 'pod')} that went: {why}")

    async def _drain(self, by: str, until_s: float) -> bool:
        """Drain all at once, for one save; return whether all ranks have saved."""
        deadline_s = max(1.0, until_s - monotonic())
        self._drained = list(self._found.drains)
        statuses = await asyncio.gather(
            *(
                self._job.drained(pod, f"scale-in by {by}", deadline_s, _printer(pod.name))
                for pod in self._drained
            )
        )
        for pod, status in zip(self._drained, statuses, strict=True):
            if status not in WENT_ON:
                raise _Stopped(f"the drain of {pod.name} ended with {status}")
        return OUTCOMES["expired"] not in statuses

    async def _until_first(self, until_s: float) -> None:
        """Wait until the owner takes the drained pods, and no others."""
        if self._scene.owner.ordinal:
            return
        until_s = max(until_s, monotonic() + 30.0)
        while True:
            scene = await self._job.look()
            names = self._names
            pods = [replace(p, cost=COST) if p.name in names else p for p in scene.pods]
            first = ahead_of(pods, names)
            if not first:
                return
            if monotonic() >= until_s:
                raise _Stopped(
                    f"{first[0].name} is not ready, and the ReplicaSet would take it first"
                )
            await asyncio.sleep(POLL_S)

    async def _until_gone(self, count: int, until_s: float, *, saved: bool) -> int:
        began_s, uids = monotonic(), {pod.uid for pod in self._found.pods}
        until_s = max(until_s, monotonic() + 30.0)
        while True:
            scene = await self._job.seen()
            if scene is not None:
                here = [pod for pod in scene.pods if not pod.deleting]
                left = [pod.name for pod in here if pod.uid in uids]
                train = [pod for pod in here if pod.trains]
                if not left and (train or not any(pod.trains for pod in self._scene.pods)):
                    took = duration(monotonic() - began_s)
                    gone = f"{', '.join(self._names)} gone after {took}"
                    trains = f"{len(train)} train on" if train else "no world trains"
                    known = hosts(here, self._job.name) if scene.central else ""
                    say(f"{gone}: {known or f'{trains}, of {count}'}")
                    return EXIT_DONE if saved else UNSAVED
            if monotonic() >= until_s:
                say(f"the count is {count}, and not all has come of it yet: muster why")
                return UNSAVED
            await asyncio.sleep(POLL_S)

    async def _undo(self, marked: dict[str, str | None]) -> None:
        """Take the drains and the marks back; what fails is said, and does not end the rest."""
        if marked:
            try:
                await self._job.unmark(marked)
            except ClusterError as error:
                note(f"the deletion costs of {', '.join(marked)} are still set: {error}")
        for pod in self._drained:
            try:
                ran = await self._job.ran("drain", pod.name, "--cancel")
                why = "" if ran.status == EXIT_DONE else f"it ended with {ran.status}"
            except ClusterError as error:
                why = str(error)
            if why:
                note(f"the drain of {pod.name} is not cancelled: {why}")
        await self._want_again()

    async def _want_again(self) -> None:
        here = sum(pod.takes_part for pod in self._scene.pods)
        sizes = self._scene.sizes
        if sizes is not None and (desired := sizes.largest(here)):
            try:
                await self._job.set_values(desired=desired)
            except ClusterError as error:
                note(f"desired is not set back: {error}")


class _Stopped(Exception):
    """The reason why a scale-in ends before the count is changed."""


def _printer(pod: str) -> Wrote:
    """Return what prints the output of a drain, line by line, with the name of its pod."""
    of_stream = {False: Lines(), True: Lines()}

    def wrote(is_stderr: bool, text: str) -> None:
        for line in of_stream[is_stderr].take(text):
            say(f"{pod}  {line}")

    return wrote
