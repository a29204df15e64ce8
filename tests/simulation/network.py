# SPDX-License-Identifier: Apache-2.0
"""One store, and between it and every client a network that loses, delays and cuts.

A request lands when the network says so, whatever has become of its sender: also after the sender
has given up, or was killed. What the client then knows is what a real driver would tell it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from rdzv.errors import Compacted, StoreAmbiguous, StoreError, StoreFull, StoreUnavailable
from rdzv.store import (
    WATCH_PROGRESS_S,
    Compare,
    KeyValue,
    Operation,
    Page,
    RangeResult,
    Rest,
    StoreStatus,
    TxnResult,
    WatchBatch,
)
from rdzv.store.interface import DEFAULT_TIMEOUT_S, Interval, WatchEvent
from rdzv.store.memory.actions import Action, Condition, Lease, LeaseTable, Reply, writes
from rdzv.store.memory.client import transact
from rdzv.store.memory.engine import NO_SPACE, VERSION, MemoryEngine
from tests.simulation.timeline import Timeline
from tests.support.clocks.virtual import Process, SimulatedLoop

T = TypeVar("T")

LATE_S = (0.1, 6.0)
"""How long after its sender has given up a request may still land."""

EARLY_SHARE = 0.3
"""Of the batches of a watch that tells early, so many come after a notice of progress."""

BROKEN_SHARE = 0.3
"""Of those notices, so many are the last that their connection brings."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a request, as it was when it was sent; ``lease_id`` is that of its registration."""

    member: str
    pod_uid: str
    lease_id: int


@dataclass(frozen=True, slots=True)
class Backup:
    """What a store held at one revision. ``leases``: the time to live of each, in seconds."""

    revision: int
    kvs: Mapping[bytes, KeyValue]
    leases: Mapping[int, int]


class SimulatedEngine(MemoryEngine):
    """The store. ``on_commit`` sees each revision as it comes, with who made it; None: a lease.

    ``life`` grows when it is restored: nothing that was sent before reaches it then.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.life = 0
        self._room_for = math.inf
        self.sender: Sender | None = None
        self.on_commit: Callable[[int, Sequence[WatchEvent], Sender | None], None] = lambda *_: None

    def fill(self, after: int) -> None:
        """Refuse all writes once so many more have landed: the last of them is refused, too.

        etcd applies the write that takes the last room, and answers it as those that follow.
        """
        self._room_for, self.full = after, not after

    def make_room(self) -> None:
        """Take writes again."""
        self._room_for, self.full = math.inf, False

    def txn(
        self,
        conditions: Sequence[Condition],
        then: Sequence[Action],
        otherwise: Sequence[Action] = (),
    ) -> tuple[bool, list[Reply]]:
        """Apply one branch, with what becomes of the room."""
        result = super().txn(conditions, then, otherwise)
        if writes(then, otherwise):
            self._room_for -= 1
            if self._room_for == 0:
                self.full = True
                raise StoreFull(NO_SPACE)
        return result

    def backup(self) -> Backup:
        """Keep what is there now."""
        self.expire_leases()
        leases = {lease_id: self.leases[lease_id].ttl_s for lease_id in self.leases}
        return Backup(self.revision, dict(self._kvs), leases)

    def restore(self, backup: Backup) -> None:
        """Be as at the time of the backup; the leases of that time begin anew."""
        self.life += 1
        self.revision = self.compact_revision = backup.revision
        self._kvs, self._keys, self._history = dict(backup.kvs), sorted(backup.kvs), []
        self.leases = LeaseTable()
        for lease_id, ttl_s in backup.leases.items():
            self.leases.add(lease_id, ttl_s, self.clock())
        for key, kv in backup.kvs.items():
            self.leases.attach(kv.lease, key)

    def _commit(self, changes: list[Any]) -> None:
        super()._commit(changes)
        if changes:
            self.on_commit(self.revision, [change[1] for change in changes], self.sender)

    def _end(self, lease: Lease) -> None:
        sender, self.sender = self.sender, None
        super()._end(lease)
        self.sender = sender


@dataclass(slots=True)
class Weather:
    """How the network is. Shares are of all calls; ``delay_s`` is the longest way, one direction.

    ``refused``: certainly not sent. ``lost``: never lands. ``unanswered``: lands, and the answer is
    lost. ``late``: lands after its sender has given up.
    """

    delay_s: float = 0.02
    refused: float = 0.0
    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0


FAIR = Weather()


class Link:
    """One client's ``Store``: everything that it says goes through the network.

    ``lag_s``: by how much its watch is late, with everything. ``on_txn`` is called with what a
    transaction would write as it is sent; if it raises, nothing is.
    """

    def __init__(
        self,
        name: str,
        loop: SimulatedLoop,
        engine: SimulatedEngine,
        network: Process,
        random: Random,
        timeline: Timeline,
    ) -> None:
        self.name = name
        self.sender: Callable[[], Sender | None] = lambda: None
        self.weather = FAIR
        self.whole = True
        self.refuses = False
        self.lag_s = 0.0
        self.on_txn: Callable[[Sequence[Operation]], object] = lambda operations: None
        self._loop = loop
        self._engine = engine
        self._network = network
        self._random = random
        self._timeline = timeline
        self._wires = 0
        self._waiting: asyncio.Future[bool] | None = None
        self._stalled_until_s = 0.0
        self._dawdles_until_s = 0.0
        self._no_leases_until_s = 0.0
        self._tells_early_until_s = 0.0

    # -- what goes wrong

    def cut(self, *, refuses: bool) -> None:
        """Let nothing through; ``refuses``: calls fail at once, instead of after their time."""
        self.whole, self.refuses = False, refuses
        self.tear()

    def mend(self) -> None:
        """Let everything through again."""
        self.whole = True
        self.tear()

    def tear(self) -> None:
        """Lose the connection, and with it what is on its way; the next one works."""
        self._wires += 1
        self._wake()

    def stall(self, seconds: float) -> None:
        """Hold the watch back, without a sign that it is."""
        self._stalled_until_s = self._loop.time() + seconds

    def tell_early(self, seconds: float) -> None:
        """Let the watch tell of revisions before it shows their events, as etcd 3.5.7 may do."""
        self._tells_early_until_s = self._loop.time() + seconds

    def dawdle(self, seconds: float) -> None:
        """Let transactions that are sent from now on land late."""
        self._dawdles_until_s = self._loop.time() + seconds

    def refuse_leases(self, seconds: float) -> None:
        """Let the store answer everything but grant no lease, so that nobody new registers."""
        self._no_leases_until_s = self._loop.time() + seconds

    # -- the Store

    async def range(
        self, key: str, *, prefix: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> RangeResult:
        """Read linearizably."""
        interval = Interval.of(key, prefix=prefix)

        def act() -> RangeResult:
            kvs = self._engine.read(interval)
            return RangeResult(self._engine.revision, kvs)

        return await self._ask("range", act, timeout_s, write=False)

    async def page(
        self,
        prefix: str,
        *,
        limit: int,
        after: str = "",
        revision: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Page:
        """Read some of the keys under ``prefix``."""
        interval = Interval.after(after, prefix)

        def act() -> Page:
            kvs = self._engine.read(interval, revision)
            return Page(revision or self._engine.revision, kvs[:limit], len(kvs) > limit)

        return await self._ask("range", act, timeout_s, write=False)

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TxnResult:
        """Apply ``then`` if every compare holds, else ``otherwise``; atomically."""
        self.on_txn(then)
        return await self._ask(
            "txn",
            lambda: transact(self._engine, compares, then, otherwise),
            timeout_s,
            write=True,
        )

    async def lease_grant(
        self, lease_id: int, ttl_s: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Grant a lease."""
        if self._loop.time() < self._no_leases_until_s:
            raise StoreUnavailable("grant: the store grants no lease now")
        await self._ask("grant", lambda: self._engine.grant(lease_id, ttl_s), timeout_s, write=True)

    async def lease_keep_alive(
        self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> float:
        """Renew a lease."""
        return await self._ask(
            "renew", lambda: self._engine.keep_alive(lease_id), timeout_s, write=True
        )

    async def lease_revoke(self, lease_id: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """End a lease."""

        def act() -> None:
            if lease_id in self._engine.leases:
                self._engine.revoke(lease_id)

        await self._ask("revoke", act, timeout_s, write=True)

    async def compact(self, revision: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Nobody of those that are simulated compacts."""
        raise NotImplementedError

    async def status(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStatus:
        """Read what the store says of itself."""
        engine = self._engine

        def act() -> StoreStatus:
            size, in_use = engine.size_bytes
            return StoreStatus(
                *("memory", VERSION, 1, 1, 1, engine.revision, size, in_use), errors=engine.alarms
            )

        return await self._ask("status", act, timeout_s, write=False)

    async def close(self) -> None:
        """Nothing to give back."""

    async def watch(
        self, prefix: str, start_revision: int, *, rest: Rest | None = None
    ) -> AsyncGenerator[WatchBatch, None]:
        """Follow every key under ``prefix``; a torn connection is resumed without a gap.

        Where the store may tell early, that is after the last event.
        """
        engine = self._engine
        if start_revision > engine.revision + 1:
            raise Compacted("that revision was never reached here", engine.compact_revision)
        interval = Interval.of(prefix, prefix=True)
        certain = told = start_revision - 1
        life = engine.life
        while True:
            while not self.whole:
                await self._woken(None)
            if engine.life != life:
                raise Compacted("the store was restored", engine.compact_revision)
            wire = self._wires
            watcher = engine.watch(interval, self._resumed_after(certain, told) + 1, self._wake)
            try:
                while wire == self._wires:
                    revision, events = watcher.take()
                    if not events and await self._woken(WATCH_PROGRESS_S):
                        continue
                    early = bool(events) and self._tells_early()
                    if not await self._arrives(wire):
                        continue
                    if events and events[0].kv.mod_revision <= told:
                        self._find_out(events[0].kv.mod_revision)
                    else:
                        yield WatchBatch(revision, () if early else events)
                    told = revision
                    if not early:
                        if events or not self._tells_early_until_s:
                            certain = revision
                    elif self._random.random() < BROKEN_SHARE:
                        self._note("watch", f"was told of {revision}, and breaks before its events")
                        self.tear()
                    elif await self._arrives(wire):
                        self._note("watch", f"was told of {revision} before its events")
                        self._find_out(revision)
            finally:
                watcher.close()

    # -- how

    async def _woken(self, timeout_s: float | None) -> bool:
        """Let the watch wait for news, or for the connection to change; False if neither comes."""
        self._waiting = waiting = self._loop.create_future()
        timer = (
            None if timeout_s is None else self._loop.call_later(timeout_s, _settle, waiting, False)
        )
        try:
            return bool(await waiting)
        finally:
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiting is not None:
            _settle(self._waiting, True)

    def _tells_early(self) -> bool:
        early_s = self._tells_early_until_s - self._loop.time()
        return early_s > 0 and self._random.random() < EARLY_SHARE

    @staticmethod
    def _resumed_after(certain: int, told: int) -> int:
        """After which revision the driver opens a stream again."""
        return certain

    def _find_out(self, revision: int) -> None:
        """Do as the driver does whose server has shown events that it said to have shown."""
        raise Compacted(f"events of up to {revision} came late", revision)

    async def _arrives(self, wire: int) -> bool:
        """Let a batch be on its way; False if the connection is torn meanwhile."""
        way_s = self._random.random() * self.weather.delay_s
        until_s = max(self._loop.time() + way_s + self.lag_s, self._stalled_until_s)
        while wire == self._wires and (left_s := until_s - self._loop.time()) > 0:
            await self._woken(left_s)
        return wire == self._wires

    async def _ask(self, call: str, act: Callable[[], T], timeout_s: float, *, write: bool) -> T:
        weather, loop = self.weather, self._loop
        chance = self._random.random()
        if (not self.whole and self.refuses) or chance < weather.refused:
            await asyncio.sleep(self._random.random() * weather.delay_s)
            raise StoreUnavailable(f"{call}: the connection is refused")
        chance -= weather.refused
        answer: asyncio.Future[T] = loop.create_future()
        way_s = self._random.random() * weather.delay_s
        if not self.whole or chance < weather.lost:
            self._note(call, "is lost")
        elif (chance := chance - weather.lost) < weather.unanswered:
            self._note(call, "is not answered")
            self._post(way_s, act, None)
        elif write and ((chance := chance - weather.unanswered) < weather.late or self._late(call)):
            late_s = timeout_s + self._random.uniform(*LATE_S)
            self._note(call, f"lands {late_s:.3f} s late")
            self._post(late_s, act, None)
        else:
            self._post(way_s, act, answer)
        timer = loop.call_later(timeout_s, _give_up, answer, call, write)
        try:
            return await answer
        finally:
            timer.cancel()

    def _late(self, call: str) -> bool:
        return call == "txn" and self._loop.time() < self._dawdles_until_s

    def _note(self, call: str, what: str) -> None:
        self._timeline.add(self.name, f"its {call} {what}")

    def _post(self, way_s: float, act: Callable[[], T], answer: asyncio.Future[T] | None) -> None:
        self._loop.call_later(
            way_s,
            *(self._land, self._wires, self._engine.life, self.sender(), act, answer),
            context=self._network.context,
        )

    def _land(
        self,
        wire: int,
        life: int,
        sender: Sender | None,
        act: Callable[[], T],
        answer: asyncio.Future[T] | None,
    ) -> None:
        if life != self._engine.life or (answer is not None and wire != self._wires):
            return  # torn on the way
        self._engine.sender = sender
        result: T | StoreError
        try:
            result = act()
        except StoreError as error:
            result = error
        finally:
            self._engine.sender = None
        if answer is not None:
            way_s = self._random.random() * self.weather.delay_s
            self._loop.call_later(way_s, self._answered, wire, answer, result)

    def _answered(self, wire: int, answer: asyncio.Future[T], result: T | StoreError) -> None:
        if wire != self._wires or answer.done():
            return
        if isinstance(result, StoreError):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def _give_up(answer: asyncio.Future[T], call: str, write: bool) -> None:
    if not answer.done():
        kind = StoreAmbiguous if write else StoreUnavailable
        answer.set_exception(kind(f"{call}: no answer in time"))


def _settle(waiting: asyncio.Future[bool], value: bool) -> None:
    if not waiting.done():
        waiting.set_result(value)
