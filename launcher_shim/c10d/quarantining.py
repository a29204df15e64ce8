# SPDX-License-Identifier: Apache-2.0
"""The quarantine records, as far as the torchruns of this sidecar's own pod have a part in them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import time

from launcher_shim.rundir.rank_reports import StepCount, StepLine, count_from
from rdzv.members.registration import Identity
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler
from rdzv.records.job import Happening, HistoryEntry
from rdzv.records.quarantine import (
    FormedWorld,
    QuarantineDecision,
    Stay,
    Terms,
    after_death,
    after_progress,
    after_time,
)
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, GuardedWrites, Operation, Put

LOOK_S = 5.0
"""Time between two looks for progress while anything is held against anybody, in seconds."""

REMEMBERED = 8
"""Maximum number of deaths that wait while the store is away; more make no difference."""

CHANGED_MAX = 40
"""Maximum number of records that one transaction changes: etcd takes 128 compares, and as many
operations."""


class TorchrunLives:
    """The steps in the present world, read from the ranks once their torchrun asks for a place.

    While a torchrun asks, its former ranks have ended and its next have not begun, and the steps
    that ranks have reported stay: so the read for a death may come late. ``steps`` reads these, and
    may block. ``died`` is called with each stay that ended by a death, in their order.
    """

    def __init__(
        self, steps: Callable[[], Sequence[StepLine]], died: Callable[[Stay], None]
    ) -> None:
        self._steps = steps
        self._died = died
        self._turns: asyncio.Queue[Stay | str] = asyncio.Queue()
        self._of: tuple[str, StepCount] | None = None
        self._asked = self._counted = 0

    def came(self, nonce: str) -> None:
        """Note a torchrun that asks for a place."""
        self._asked += 1
        self._turns.put_nowait(nonce)

    def ended(self, stay: Stay) -> None:
        """Note a death; its steps have not been read yet."""
        self._turns.put_nowait(stay)

    async def run(self) -> None:
        """Read the steps for each note, in their order, until cancelled."""
        while True:
            turn = await self._turns.get()
            lines = await asyncio.to_thread(self._steps)
            if isinstance(turn, Stay):
                self._died(replace(turn, steps=self._seen(turn.nonce, lines)))
            else:
                self._of = turn, count_from(lines)
                self._counted += 1

    async def made(self, nonce: str) -> int | None:
        """Read how many steps there are in the present world; None while no rank reports any."""
        lines = await asyncio.to_thread(self._steps)
        return self._seen(nonce, lines) if self._counted == self._asked else None

    def _seen(self, nonce: str, lines: Sequence[StepLine]) -> int | None:
        if self._of is None or self._of[0] != nonce:
            return None
        self._of = nonce, self._of[1].seen(lines)
        return self._of[1].made


class Quarantining(Reconciler):
    """The part of one sidecar: it counts the deaths here, and sees the progress of the world here.

    ``steps`` reads the steps that the ranks of this pod report; may block.
    """

    def __init__(
        self,
        kernel: Kernel,
        identity: Identity,
        *,
        terms: Terms,
        steps: Callable[[], Sequence[StepLine]] = tuple,
    ) -> None:
        super().__init__(kernel, "quarantine")
        self._client = kernel.client
        self._member = identity.member
        self._pod_uid = identity.pod_uid
        self._terms = terms
        self._died: deque[Stay] = deque(maxlen=REMEMBERED)
        self._lives = TorchrunLives(steps, self._count)
        self._in: tuple[str, FormedWorld] | None = None
        """The torchrun that is in a world, and that world."""
        self._out: tuple[object, float] = (None, 0.0)
        """The number of the pause of this pod, and since when it goes on."""

    def came(self, nonce: str) -> None:
        """Note a torchrun that asks for a place."""
        self._in = None
        self._lives.came(nonce)

    def entered(self, nonce: str, world: FormedWorld) -> None:
        """Note a torchrun that has come into a world."""
        self._in = nonce, world
        self.wake()

    def died(self, stay: Stay) -> None:
        """Note a torchrun that has ended by itself, and the world that it was in."""
        self._in = None
        self._lives.ended(stay)

    def _count(self, stay: Stay) -> None:
        self._died.append(stay)
        self.wake()

    async def run(self) -> None:
        """Write each change of the records until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lives.run(), name="lives of torchruns")
            tasks.create_task(super().run(), name="quarantine records")

    async def step(self) -> Outlook:
        """Decide on the records, and when to check again without a change."""
        snapshot = self._client.membership.snapshot()
        changed = partial(self._client.membership.changed_from, snapshot)
        if snapshot.job is None:
            return Outlook(changed)
        # Whatever a decision rests on is in the mirror by now, and has not changed when it is
        # written.
        revision = self._client.mirror.certain_revision
        death = self._died[0] if self._died else None
        decision = await self._decide(snapshot, death)
        if not decision.records:
            if death is not None:
                self._died.popleft()
            return Outlook(changed, decision.wake_at_s, again=death is not None)
        is_out = any(one is not None and one.out for one in decision.records.values())
        write = DueWrite(
            partial(self._writes, snapshot, decision, revision),
            f"{', '.join(sorted(decision.records))}: {decision.reason}",
            {"event": "quarantine"},
            logging.WARNING if is_out else logging.INFO,
            written=partial(self._note_written, death, decision),
        )
        return Outlook(changed, write=write)

    def _note_written(self, death: Stay | None, decision: QuarantineDecision) -> None:
        if death is not None and decision.records.get(self._member) is None:
            # If it is counted, it is done once the watch shows that: a restored store may lose it.
            self._died.popleft()

    async def _decide(self, snapshot: Snapshot, death: Stay | None) -> QuarantineDecision:
        assert snapshot.rules is not None
        records, now = snapshot.quarantines, self.clock()
        mine = records.get(self._member)
        pause = (mine.pod_uid, mine.pauses) if mine is not None and mine.out else None
        if pause != self._out[0]:
            self._out = (pause, now)
        if death is not None:
            listing = self._client.membership.listing()
            listed = {one.name for one in (*listing.listed, *listing.standby)}
            fit = len(listed - listing.quarantined - {self._member})
            least = snapshot.rules.policy.smallest
            return after_death(records, self._member, self._pod_uid, death, fit, least, self._terms)
        wake_at_s = math.inf
        if self._in is not None and records:
            nonce, world = self._in
            decision = after_progress(records, world.members)
            if decision.records:
                steps = await self._lives.made(nonce)
                if Stay(nonce, world, now - world.since_s, steps).has_progress(self._terms):
                    return decision
                wake_at_s = now + LOOK_S
        if mine is None or mine.pod_uid != self._pod_uid:
            return QuarantineDecision(wake_at_s=wake_at_s)
        tried = any(
            one.pauses and not one.out
            for name, one in records.items()
            if name in snapshot.members and one.pod_uid == snapshot.members[name].pod_uid
        )
        decision = after_time(now, mine, self._out[1], self._terms, another_is_tried=tried)
        return replace(decision, wake_at_s=min(decision.wake_at_s, wake_at_s))

    def _writes(
        self, snapshot: Snapshot, decision: QuarantineDecision, revision: int
    ) -> GuardedWrites:
        assert snapshot.job is not None
        here = self._client.keys.in_generation(snapshot.job.generation)
        # No other torchrun has died meanwhile: of those that die together, one is the first.
        compares = [Compare(here.quarantines, "mod", "<", revision + 1, prefix=True)]
        operations: list[Operation] = []
        told: list[HistoryEntry] = []
        for name, after in sorted(decision.records.items())[:CHANGED_MAX]:
            key, before = here.quarantine(name), snapshot.quarantines.get(name)
            # A corrupt record counts as none.
            if key not in snapshot.corrupt:
                known = before.mod_revision if before else 0
                compares.append(Compare(key, "mod", "=", known))
            operations.append(Delete(key) if after is None else Put(key, after.to_json()))
            was_out, is_out = before is not None and before.out, after is not None and after.out
            if was_out != is_out and (one := after or before) is not None:
                details = {"deaths": one.deaths, "pod_uid": one.pod_uid}
                what: Happening = "quarantine" if is_out else "admit"
                told.append(HistoryEntry(what, name, decision.reason, time(), details=details))
        return compares, [*operations, *self._client.history(*told)]
