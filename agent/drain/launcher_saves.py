# SPDX-License-Identifier: Apache-2.0
"""Promises, and then reports, the save of this pod's rank for a Horovod launcher that drains."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from agent.rundir.files import RunDir
from rdzv.drain.standing import answer, asked
from rdzv.drain.transactions import change
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler
from rdzv.records.drain import Drain

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Poll interval of the ranks while a save is to come: the standard library has no file
notification."""


class LauncherSaves(Reconciler):
    """The follower of the launcher's drain, on behalf of the ranks of one pod."""

    def __init__(self, kernel: Kernel, run_dir: RunDir, me: str) -> None:
        super().__init__(kernel, "launcher-saves")
        self._run_dir = run_dir
        self._me = me

    async def step(self) -> Outlook:
        """Follow the store, and the ranks while a save is to come."""
        client = self.kernel.client
        snapshot = client.membership.snapshot()
        changed = partial(client.membership.changed_from, snapshot)
        drain = asked(snapshot)
        if drain is None or drain.outcome or drain.step is not None:
            return Outlook(changed)
        # A rank that ended has left its file behind.
        running = await asyncio.to_thread(self._run_dir.commands)
        ranks = await asyncio.to_thread(self._run_dir.ranks) if running else ()
        after = answer(
            drain,
            self._me,
            snapshot,
            saver=any(rank.saver for rank in ranks),
            answers=[rank.answered for rank in ranks if rank.answered],
        )
        write = None
        if after is not None:
            writes = partial(change, client.keys, snapshot, after)
            write = DueWrite(writes, written=partial(_log, after))
        return Outlook(changed, self.kernel.clock() + LOOK_S, write)


def _log(drain: Drain) -> None:
    log.info(
        "a rank of this pod %s before %s goes",
        "saves" if drain.step is None else f"has saved step {drain.step}",
        drain.member,
        extra={"event": "launcher_save", "step": drain.step},
    )
