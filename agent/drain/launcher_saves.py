# SPDX-License-Identifier: Apache-2.0
"""Promises, and then reports, the save of this pod's rank for a Horovod launcher that drains."""

from __future__ import annotations

import asyncio
import logging

from agent.drain.writer import DrainWriter
from agent.rundir.files import RunDir
from rdzv.drain.launcher_save import answer, asked
from rdzv.drain.transactions import change
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.race import first_of
from rdzv.records.drain import Drain
from rdzv.snapshot import Snapshot

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Poll interval of the ranks while a save is to come: the standard library has no file
notification."""


class LauncherSaves:
    """The follower of the launcher's drain, on behalf of the ranks of one pod."""

    def __init__(
        self, run_dir: RunDir, client: JobClient, registrar: Registrar, writing: DrainWriter
    ) -> None:
        self._run_dir = run_dir
        self._client = client
        self._registrar = registrar
        self._writing = writing

    async def run(self) -> None:
        """Follow the store, and the ranks while a save is to come, until cancelled."""
        while True:
            snapshot = self._client.membership.snapshot()
            drain = asked(snapshot)
            saves = drain is not None and not drain.outcome and drain.step is None
            if saves and drain is not None:
                # A rank that ended has left its file behind.
                running = await asyncio.to_thread(self._run_dir.commands)
                ranks = await asyncio.to_thread(self._run_dir.ranks) if running else ()
                said = answer(
                    drain,
                    self._registrar.identity.member,
                    snapshot,
                    saver=any(rank.saver for rank in ranks),
                    answers=[rank.answered for rank in ranks if rank.answered],
                )
                if said is not None and await self._say(snapshot, said):
                    continue
            changed = self._client.membership.changed_from(snapshot)
            await first_of(changed, timeout_s=LOOK_S if saves else None)

    async def _say(self, snapshot: Snapshot, drain: Drain) -> bool:
        if not await self._writing.txn(*change(self._client.keys, snapshot, drain)):
            return False
        log.info(
            "a rank of this pod %s before %s goes",
            "saves" if drain.step is None else f"has saved step {drain.step}",
            drain.member,
            extra={"event": "launcher_save", "step": drain.step},
        )
        return True
