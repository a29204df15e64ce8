# SPDX-License-Identifier: Apache-2.0
"""The end of a roll-out that was taken back, if no pod registers after it.

A Deployment starts the last pod of the former template before the last one of the newer is gone:
then no registration shows that no member has the newer one, and a present member has to notice.
"""

from __future__ import annotations

import logging
from functools import partial
from time import time

from rdzv.members.registrar import Registrar
from rdzv.members.templates import left_to
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Job
from rdzv.records.job_change import change_between
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, GuardedWrites, Operation, Put

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Interval of looks at a job of another generation than that of the registration, in seconds."""


class RollBack(Reconciler):
    """The return to this member's template once no member with the present one is left.

    ``patience_s``: how long none must have been there, as one that has lost its lease may come
    back. A shorter one takes a roll-out back for an outage of the store.
    """

    def __init__(self, kernel: Kernel, registrar: Registrar, *, patience_s: float) -> None:
        super().__init__(kernel, "roll-back")
        self._registrar = registrar
        self._patience_s = patience_s
        self._since_s: float | None = None

    async def step(self) -> Outlook:
        """Decide whether this member is left alone with another template, and for how long."""
        membership, now = self.kernel.client.membership, self.kernel.clock()
        snapshot = membership.snapshot()
        before, job = snapshot.job, self._left(snapshot)
        changed = partial(membership.changed_from, snapshot)
        if before is None or job is None:
            self._since_s = None
            return Outlook(changed)
        self._since_s = now if self._since_s is None else self._since_s
        due_s = self._since_s + self._patience_s
        if now < due_s:
            return Outlook(changed, due_s)
        if self._registrar.generation not in (None, job.generation):
            return Outlook(changed, now + RETRY_S)
        change = change_between(before, job)
        writes = partial(self._writes, snapshot, job, change)
        return Outlook(changed, write=DueWrite(writes, written=partial(self._log, change)))

    def _left(self, snapshot: Snapshot) -> Job | None:
        identity = self._registrar.identity
        return left_to(snapshot, identity.member, identity.template)

    def _writes(self, snapshot: Snapshot, job: Job, change: str) -> GuardedWrites:
        # After an attempt that fails members may be about to come back: wait for them once more.
        self._since_s = self.kernel.clock()
        client = self.kernel.client
        operations: list[Operation] = [Put(client.keys.job, job.to_json())]
        if change:
            why = f"no member with the newer template is left: {change}"
            entry = HistoryEntry("set", self._registrar.identity.member, why, time())
            operations += client.history(entry)
        # No member has come, or come back, since.
        members = client.keys.in_generation(job.generation).members
        return [
            Compare(client.keys.job, "mod", "=", job.mod_revision),
            Compare(members, "mod", "<", snapshot.revision + 1, prefix=True),
        ], operations

    def _log(self, change: str) -> None:
        log.info(
            "no member with the newer template is left: rolled back to this pod's template%s",
            f": {change}" if change else "",
            extra={"event": "template"},
        )
