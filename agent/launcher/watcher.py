# SPDX-License-Identifier: Apache-2.0
"""Watches the launcher beside this sidecar, and publishes what ``agent.launcher.check`` finds.

Each change is published once: in the log, in the store (where ``muster status`` reads it), and as a
metric.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from agent.launcher import check
from agent.launcher.check import (
    FINE,
    LauncherObservations,
    LauncherPolicy,
    LauncherView,
    observe,
)
from agent.rundir.files import RunDir
from agent.rundir.launch_report import LaunchReport
from launcher_shim.c10d.endpoint import Endpoint
from launcher_shim.c10d.rounds.stages import torch_run_id
from rdzv.errors import RecordError, StoreError
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Loop, Outlook
from rdzv.records.troubles import KINDS, REMARKS, Bypass
from rdzv.store import Delete, Operation, Put

log = logging.getLogger(__name__)

LOOK_S = 2.0
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
        look_s: float = LOOK_S,
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
        self._log_change(check.decide(now, self._seen, sight, self._policy))
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
        driven = commands or (launch is not None and launch.launcher == "horovodrun")
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
