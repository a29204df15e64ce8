# SPDX-License-Identifier: Apache-2.0
"""The quarantine records, as far as the torchruns of this sidecar's own pod have a part in them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import time

from launcher_shim.rundir.step_count import StepCount, count_from
from launcher_shim.rundir.step_lines import StepLine
from rdzv.errors import LeaseLost, StoreError
from rdzv.job import JobClient
from rdzv.members.guard import Registered
from rdzv.members.registration import Identity
from rdzv.race import first_of
from rdzv.records.history import Happening, HistoryEntry
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

log = logging.getLogger(__name__)

RETRY_S = 1.0

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


class Quarantining:
    """The part of one sidecar: it counts the deaths here, and sees the progress of the world here.

    ``registered``: the registration in force, or None. ``clock`` is monotonic, in seconds.
    ``steps`` reads the steps that the ranks of this pod report; may block.
    """

    def __init__(
        self,
        client: JobClient,
        identity: Identity,
        *,
        registered: Callable[[], Registered | None],
        clock: Callable[[], float],
        terms: Terms,
        steps: Callable[[], Sequence[StepLine]] = tuple,
    ) -> None:
        self._client = client
        self._member = identity.member
        self._pod_uid = identity.pod_uid
        self._registered = registered
        self._clock = clock
        self._terms = terms
        self._died: deque[Stay] = deque(maxlen=REMEMBERED)
        self._lives = TorchrunLives(steps, self._count)
        self._in: tuple[str, FormedWorld] | None = None
        """The torchrun that is in a world, and that world."""
        self._out: tuple[object, float] = (None, 0.0)
        """The number of the pause of this pod, and since when it goes on."""
        self._stirred = asyncio.Event()

    def came(self, nonce: str) -> None:
        """Note a torchrun that asks for a place."""
        self._in = None
        self._lives.came(nonce)

    def entered(self, nonce: str, world: FormedWorld) -> None:
        """Note a torchrun that has come into a world."""
        self._in = nonce, world
        self._stirred.set()

    def died(self, stay: Stay) -> None:
        """Note a torchrun that has ended by itself, and the world that it was in."""
        self._in = None
        self._lives.ended(stay)

    def _count(self, stay: Stay) -> None:
        self._died.append(stay)
        self._stirred.set()

    async def run(self) -> None:
        """Write each change of the records until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lives.run(), name="lives of torchruns")
            tasks.create_task(self._keep(), name="quarantine records")

    async def _keep(self) -> None:
        while True:
            self._stirred.clear()
            snapshot = self._client.membership.snapshot()
            wake_at_s = math.inf
            try:
                wake_at_s = await self._step(snapshot)
            except StoreError as error:
                # The store may show a registration that is not in force yet, with no later change
                # to wake on.
                if not isinstance(error, LeaseLost):
                    log.info("cannot update the quarantine record, retrying: %s", error)
                wake_at_s = self._clock() + RETRY_S
            # A torchrun, a change of the membership, or time.
            await first_of(
                self._stirred.wait(),
                self._client.membership.changed_from(snapshot),
                timeout_s=max(0.0, wake_at_s - self._clock()),
            )

    async def _step(self, snapshot: Snapshot) -> float:
        """Write once if something is due; return when to check again without a change."""
        registered = self._registered()
        if snapshot.job is None or registered is None:
            return math.inf
        # Whatever a decision rests on is in the mirror by now, and has not changed when it is
        # written.
        revision = self._client.mirror.certain_revision
        death = self._died[0] if self._died else None
        decision = await self._decide(snapshot, death)
        if not decision.records:
            if death is not None:
                self._died.popleft()
                return self._clock()
            return decision.wake_at_s
        compares, operations = self._transaction(snapshot, decision, revision)
        result = await self._client.store.txn([*compares, registered.holds()], operations)
        if not result.succeeded:
            return self._clock() + RETRY_S
        if death is not None and decision.records.get(self._member) is None:
            # If it is counted, it is done once the watch shows that: a restored store may lose it.
            self._died.popleft()
        is_out = any(one is not None and one.out for one in decision.records.values())
        log.log(
            logging.WARNING if is_out else logging.INFO,
            "%s: %s",
            ", ".join(sorted(decision.records)),
            decision.reason,
            extra={"event": "quarantine"},
        )
        # Wait for the watch: the next decision is to see these records.
        await self._client.mirror.shown(result.revision)
        return self._clock()

    async def _decide(self, snapshot: Snapshot, death: Stay | None) -> QuarantineDecision:
        assert snapshot.rules is not None
        records, now = snapshot.quarantines, self._clock()
        mine = records.get(self._member)
        pause = (mine.pod_uid, mine.pauses) if mine is not None and mine.out else None
        if pause != self._out[0]:
            self._out = (pause, now)
        if death is not None:
            listing = self._client.membership.listing()
            listed = {one.name for one in (*listing.listed, *listing.standby)}
            fit = len(listed - listing.quarantined - {self._member})
            least = snapshot.rules.sizes.smallest
            return after_death(records, self._member, self._pod_uid, death, fit, least, self._terms)
        wake_at_s = math.inf
        if self._in is not None:
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

    def _transaction(
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
