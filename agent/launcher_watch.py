# SPDX-License-Identifier: Apache-2.0
"""The watch over the launcher beside this sidecar: whether it uses it, and who ended its world.

Each change of what ``agent.launcher_check`` finds is published once: in the log, in the store
(where ``muster status`` reads it), and as a metric. A torchrun that loses a worker leaves its round
at once, and nothing else makes it do so before the round's record says that the world must form
again. So the round is what is waited for, and the errors of the ranks are read then, the newest of
them stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import time

from agent import launcher_check
from agent.launcher_check import (
    FINE,
    LauncherObservations,
    LauncherPolicy,
    LauncherView,
    observe,
)
from agent.rundir.files import RunDir
from agent.rundir.reports import FailureReport, LaunchReport
from launcher_shim.c10d.endpoint import Endpoint
from launcher_shim.c10d.rounds.records import LOST
from launcher_shim.c10d.rounds.stages import torch_run_id
from launcher_shim.pod.launchers import has_rounds
from rdzv.drain.inputs import LiveRound, LiveRounds
from rdzv.errors import RecordError, StoreError
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Loop, Outlook
from rdzv.records.job import HistoryEntry
from rdzv.records.quarantine import Terms
from rdzv.records.troubles import KINDS, REMARKS, Bypass, Failure, after, is_alike, is_told
from rdzv.store import Delete, Operation, Put

log = logging.getLogger(__name__)

LAUNCH_LOOK_S = 2.0
"""Poll interval of the run directory; the standard library has no file notification."""


class LauncherWatcher(Loop):
    """The watcher of one member's launcher; ``ready`` returns whether launchers may start."""

    def __init__(
        self,
        run_dir: RunDir,
        client: JobClient,
        registrar: Registrar,
        endpoint: Endpoint,
        policy: LauncherPolicy,
        *,
        ready: Callable[[], bool],
        clock: Callable[[], float],
        look_s: float = LAUNCH_LOOK_S,
    ) -> None:
        super().__init__(clock)
        self.finding = FINE
        self._run_dir = run_dir
        self._client = client
        self._registrar = registrar
        self._endpoint = endpoint
        self._policy = policy
        self._ready = ready
        self._look_s = look_s
        self._seen = LauncherObservations()

    def by_kind(self) -> dict[str, float]:
        """Return 1 for the kind that is found now, 0 for the others."""
        return {kind: float(kind == self.finding.kind) for kind in KINDS[1:]}

    @property
    def slots(self) -> int:
        """The workers of this pod: what its torchrun started, else what its sidecar was given."""
        return self.finding.slots or self._registrar.identity.slots

    async def step(self) -> Outlook:
        """Look at the launcher, and publish what has changed."""
        sight = self._sight(*await asyncio.to_thread(self._read))
        now = self.clock()
        self._seen = observe(now, self._seen, sight, self._policy)
        self._log_change(launcher_check.decide(now, self._seen, sight, self._policy))
        await self._write()
        return Outlook(look_at_s=self.clock() + self._look_s)

    def _read(self) -> tuple[LaunchReport | None, bool, bool, tuple[str, ...]]:
        run_dir = self._run_dir
        commands = run_dir.commands() is not None
        return run_dir.launch(), bool(run_dir.ranks()), commands, run_dir.plain_starts()

    def _sight(
        self, launch: LaunchReport | None, ranks: bool, commands: bool, plain: tuple[str, ...]
    ) -> LauncherView:
        me, snapshot = self._registrar.identity, self._client.membership.snapshot()
        driven = commands or (launch is not None and not has_rounds(launch.launcher))
        driven = driven or any(one.role == "launcher" for one in snapshot.members.values())
        rendezvous = self._endpoint.rendezvous()
        return LauncherView(
            expected=self._ready() and me.role == "worker" and not driven,
            over=self._endpoint.any_closed,
            launch=launch,
            runs={
                torch_run_id(run_id): agent.foreign_size
                for run_id, agent in self._endpoint.launchers()
                if agent.claim.named
            },
            others=frozenset(
                torch_run_id(run_id)
                for run_id, run in rendezvous.items()
                for node in run.snapshot().nodes.values()
                if node.member != me.member and node.state != "left"
            ),
            ranks=ranks,
            workers=self._endpoint.workers,
            plain=plain,
        )

    def _log_change(self, finding: Bypass) -> None:
        if finding == self.finding:
            return
        before, self.finding = self.finding, finding
        if not finding.kind:
            if before.kind in REMARKS:
                return  # nothing was wrong
            log.info("the launcher uses its sidecar correctly again", extra={"event": "launcher"})
            return
        level = logging.INFO if finding.kind in REMARKS | {"unseen"} else logging.WARNING
        sentence = f"{self._registrar.identity.member}: {finding.sentence}"
        log.log(level, "%s", sentence, extra={"event": "launcher", "kind": finding.kind})

    async def _write(self) -> None:
        """Store the finding if the store has another one; a failed write is retried later."""
        registrar = self._registrar
        lease_id, generation = registrar.lease_id, registrar.generation
        if generation is None or lease_id is None:
            return
        here = registrar.keys.in_generation(generation)
        key = here.bypass(registrar.identity.member)
        kv = self._client.mirror.kvs.get(key)
        try:
            stored = Bypass.from_kv(kv) if kv is not None and kv.lease == lease_id else FINE
        except RecordError:
            stored = FINE
        if stored == self.finding and (kv is None) == (not self.finding.kind):
            return
        change: Operation = Delete(key)
        if self.finding.kind:
            change = Put(key, self.finding.to_json(), lease_id)
        try:
            await self._client.store.txn([registrar.guard(generation).holds()], [change])
        except StoreError as error:
            log.debug("retrying to report the launcher to the store: %s", error)


OTHERS_S = 2.0
"""Time that an error waits for the record of another one, which may be its cause, or alike."""

REPORT_RETRY_S = 1.0
REPORT_TRIES = 30
"""Number of attempts to store a record: the log has it in any case."""

UNREPORTED = "a worker ended and reported no Python error: it was killed, or exited by itself"


class FailureReporter(Loop):
    """The reporter of one pod's failures. ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        run_dir: RunDir,
        client: JobClient,
        registrar: Registrar,
        endpoint: Endpoint,
        terms: Terms,
        *,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(clock)
        self.total = 0
        """Number of worlds that have ended by a failure here."""
        self._run_dir = run_dir
        self._client = client
        self._registrar = registrar
        self._endpoint = endpoint
        self._terms = terms
        self._formed_s = clock()
        self._world: LiveRound | None = None
        """The world that this pod's torchrun is in, or has just left."""
        self._lease_id: int | None = None
        """The lease by which the others knew this pod in its world."""
        self._seen: frozenset[tuple[int, float]] = frozenset()

    async def run(self) -> None:
        """Report each failure until cancelled."""
        await self._fresh()  # those from before this sidecar
        await super().run()

    async def step(self) -> Outlook:
        """Note the world that this pod is in; report its failure once the pod has left it."""
        now = self._endpoint.live_rounds()
        world, own = self._world, now.own
        if world is not None and self._has_left(world, own):
            if not world.finishing:
                await self._report(world, now)
            world = self._world = None
        if own is not None and own.live and self._endpoint.trains_in(own):
            if world is None or _place(own) != _place(world):
                self._formed_s = self.clock()
            self._world, self._lease_id = own, self._registrar.lease_id
        return Outlook(partial(self._endpoint.live_rounds_changed, now))

    def _has_left(self, world: LiveRound, now: LiveRound | None) -> bool:
        """Return whether this pod's torchrun has left ``world``."""
        if now is None or _place(now) != _place(world):
            return True
        return self._registrar.identity.member in now.left

    async def _report(self, world: LiveRound, now: LiveRounds) -> None:
        lasted_s = self.clock() - self._formed_s
        here = [one for one in await self._fresh() if one.master == world.master]
        by_itself = self._left_by_itself(world, now)
        failure = Failure(
            self._registrar.identity.member, world.run, world.number, at_unix_s=time()
        )
        if here:
            first = next((one for one in here if not one.follows), here[0])
            failure = replace(
                failure,
                rank=first.rank,
                kind=first.kind,
                text=first.text,
                where=first.where,
                follows=first.follows,
            )
        elif by_itself:
            failure = replace(failure, text=UNREPORTED)
        else:
            return
        if by_itself is False and not await self._are_alike(failure):
            return
        self.total += 1
        progressed = await asyncio.to_thread(self._has_progress, lasted_s)
        if failure.follows:
            await asyncio.sleep(OTHERS_S)
        log.warning(
            "round %d ended: %s",
            world.number,
            failure.sentence,
            extra={"event": "failed", "round": world.number, "rank": failure.rank},
        )
        for _ in range(REPORT_TRIES):
            if await self._stored(failure, progressed=progressed):
                return
            await asyncio.sleep(REPORT_RETRY_S)

    async def _are_alike(self, failure: Failure) -> bool:
        """Return whether the world ended by the same error of another member."""
        if not is_alike(failure, self._client.membership.failures()):
            await asyncio.sleep(OTHERS_S)
        return is_alike(failure, self._client.membership.failures())

    async def _fresh(self) -> list[FailureReport]:
        """Read the reports that were not there at the last call."""
        reports = await asyncio.to_thread(self._run_dir.failures)
        former, self._seen = self._seen, frozenset((one.pid, one.at_boot_s) for one in reports)
        return [one for one in reports if (one.pid, one.at_boot_s) not in former]

    def _left_by_itself(self, world: LiveRound, now: LiveRounds) -> bool | None:
        """Return whether its own workers made this pod's torchrun leave; None if it is unknown.

        Whatever they raise once the store says that the world must form again follows from that.
        """
        me, snapshot = self._registrar.identity, self._client.membership.snapshot()
        if world.reforms or world.ends or me.pod_uid in snapshot.drains:
            return False
        if world.restored or any(one is not None and one.restored for one in now):
            return None  # torchruns leave a world of which the store has lost keys
        same = [one for one in now if one is not None and _place(one) == _place(world)]
        if not same:  # all have left it; or the others have, while this pod was cut off
            alone = now.counts is None or {*now.counts.members, *now.counts.asking} <= {me.member}
            return True if alone and world.members == (me.member,) else None
        if not self._registrar.registered.is_set() or self._registrar.lease_id != self._lease_id:
            return None  # the others have lost this pod, whatever its workers did
        (later, *_) = same
        if later.ends or later.closed:
            return later.ends.startswith(LOST) and me.member in later.ends[len(LOST) :].split(", ")
        return True if later.left == {me.member} else None

    def _has_progress(self, lasted_s: float) -> bool:
        """Return whether the world has made enough to count its failure as a new one."""
        made = [line.step - line.first for line in self._run_dir.steps() if line.first is not None]
        if made:
            return max(made) >= self._terms.steps
        return lasted_s >= self._terms.brief_s

    async def _stored(self, failure: Failure, *, progressed: bool) -> bool:
        """Write the record; return False if that failed."""
        lease_id, generation = self._registrar.lease_id, self._registrar.generation
        if lease_id is None or generation is None:
            return False
        here = self._client.keys.in_generation(generation)
        records = self._client.membership.failures()
        record, reason = after(failure, records, progressed=progressed)
        if record is None:
            log.debug("not stored: %s", reason)
            return True
        operations: list[Operation] = [Put(here.failure(record.member), record.to_json(), lease_id)]
        if is_told(record):
            details = {
                "round": record.round,
                "rank": record.rank,
                "error": record.kind,
                "in_a_row": record.count,
                "pod_uid": self._registrar.identity.pod_uid,
            }
            entry = HistoryEntry("failed", record.member, record.sentence, time(), details)
            operations += self._client.history(entry)
        try:
            guard = self._registrar.guard(generation).holds()
            result = await self._client.store.txn([guard], operations)
        except StoreError as error:
            log.debug("retrying to store a failure: %s", error)
            return False
        return result.succeeded


def _place(round: LiveRound | None) -> tuple[str, int] | None:
    return None if round is None else (round.run, round.number)
