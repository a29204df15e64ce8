# SPDX-License-Identifier: Apache-2.0
"""A job on real etcd members, and all that a fault does to it, measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.stages import SHARED_RUN
from rdzv.errors import StoreError
from rdzv.keys import JobKeys
from rdzv.members.registration import Held
from rdzv.membership import snapshot_of
from rdzv.store.access import Access
from rdzv.store.etcd.client import EtcdStore
from tests.support.faults.link import Link
from tests.support.faults.watch import Drill, Health, Numbers, Seen, Swaps, eventually, gap_s
from tests.support.histories.order import StoreOrder, store_order
from tests.support.histories.pods import HistoryLoad, pod
from tests.support.histories.recorded import History, Record, verdict
from tests.support.sidecars.endpoints import Pod
from tests.support.store.backend import DRIVERS
from tests.support.store.etcd_cluster import EtcdCluster

if TYPE_CHECKING:
    from tests.support.faults.agents import Agents
    from tests.support.faults.job import LinkedJob

SIDECARS = 3
UNTIL_S = 120.0
"""For anything that is waited for: this only ends what hangs."""
CHECK_S = 60.0
RUN_ID = "digits"

_jobs = count(1)
_loads = count(1)


@dataclass(frozen=True)
class Effect:
    """What was seen of one fault; times are the worst of all sidecars.

    Times are for the table alone, and no bar: ``store_gap_s``, for how long the store itself could
    not serve, whoever asks (``watch.Health``), which is found beside a real job alone. ``worlds``
    counts those that formed since the fault began. ``wrong`` has a sentence for each thing that may
    never be.
    """

    store_gap_s: float
    watch_gap_s: float
    write_outage_s: float
    events: int
    lost: int
    doubled: int
    out_of_order: int
    registered_again: int
    worlds: int
    operations: int
    wrong: tuple[str, ...]


Fault = Callable[["FaultRig"], Coroutine[None, None, None]]
"""Breaks something, lets time pass, and mends it."""


class FaultRig:
    """Three sidecars, each on lines of its own to each store member, with clients and witnesses."""

    def __init__(
        self,
        cluster: EtcdCluster,
        access: Access,
        keys: JobKeys,
        store: EtcdStore,
        lease_ttl_s: float,
    ) -> None:
        self.cluster = cluster
        self.access = access
        self.keys = keys
        self.store = store
        self.lease_ttl_s = lease_ttl_s
        self.links: list[list[Link]] = []
        self.pods: list[Pod] = []
        self.agents: Agents | None = None
        self.job: LinkedJob | None = None
        self.fenced: set[str] = set()
        self.told: list[str] = []
        self.members = History()
        self._began_s = time.monotonic()
        self._since_s = self._began_s
        self._drill: Drill

    # -- for faults

    def tell(self, what: str) -> None:
        """Put a line into the timeline."""
        self.told.append(f"{time.monotonic() - self._began_s:7.2f} s  {what}")

    async def do(self, what: str, act: Callable[[], object]) -> None:
        """Do what blocks, and say so."""
        self.tell(what)
        await asyncio.to_thread(act)

    async def until(self, what: Callable[[], bool | Awaitable[bool]], why_not: str) -> None:
        """Wait until ``what`` holds."""
        assert await eventually(what, UNTIL_S), self.story(why_not)

    async def settled(self) -> None:
        """Wait until everybody writes, sees and is registered again."""
        goes_on = self._drill.goes_on()
        held = [one.registrar.registered for one in self.pods if one.name not in self.fenced]
        await self.until(
            lambda: goes_on() and all(one.is_set() for one in held), "not everybody came back"
        )

    def measure_from_now(self) -> None:
        """Take what the fault has done so far for its preparation."""
        self._since_s = time.monotonic()

    async def outlasted(self) -> None:
        """A fault that leaves the store whole lasts until everybody has gone past it, and renewed.

        A client that waited for its end would wait for ever.
        """
        gone_past = self._drill.goes_on()
        before = [one.registrar.lease_valid_until_s for one in self.pods]
        await self.until(gone_past, "they wait for the end of the fault")
        await self.until(
            lambda: all(
                one.registrar.lease_valid_until_s > valid_s
                for one, valid_s in zip(self.pods, before, strict=True)
            ),
            "they do not renew before the end of the fault",
        )
        if self.job is not None:
            await asyncio.sleep(self.lease_ttl_s)

    async def noticed(self) -> None:
        """Wait until no sidecar says any more that all is well with the store."""
        await self.until(
            lambda: not any(one.client.mirror.healthy(time.monotonic()) for one in self.pods),
            "somebody says that all is well",
        )

    async def most_used(self) -> int:
        """The member that most of the sidecars' bytes go through."""
        before = [[link.chunks for link in links] for links in self.links]
        await asyncio.sleep(0.5)
        passed = [
            [link.chunks - chunks for link, chunks in zip(links, old, strict=True)]
            for links, old in zip(self.links, before, strict=True)
        ]
        busy = [sum(column) for column in zip(*passed, strict=True)]
        return busy.index(max(busy))

    def each_line(self, act: Callable[[Link], None], member: int | None = None) -> None:
        """Do something to every line, or to those to one member; the real job's too."""
        for links in self.links:
            for number, link in enumerate(links):
                if member in (None, number):
                    act(link)
        if self.job is not None:
            for node in self.job.nodes.values():
                for number, proxy in enumerate(node.proxies):
                    if member in (None, number):
                        assert isinstance(proxy, Link)
                        self.job.background.later(partial(act, proxy))

    # -- making it

    def joining(self, name: str) -> Callable[[Held], Awaitable[None]]:
        """Write the joins of one member down: each began when the one before it was done."""
        member = self.members.client()
        join: Record
        lapse: Record | None = None

        def begin(incarnation: int) -> None:
            nonlocal join
            join = self.members.begin(Record(member, "join", name, value=str(incarnation)))

        async def held(now: Held) -> None:
            nonlocal lapse
            self.tell(f"{name} is registered as incarnation {now.incarnation}")
            join.value = str(now.incarnation)
            self.members.end(join)
            if lapse is not None:
                self.members.end(lapse)  # from now on it makes no difference
            # The store may end its lease at any time from its grant on.
            lapse = Record(self.members.client(), "lapse", name, value=join.value)
            lapse.call_ns = join.call_ns
            self.members.records.append(lapse)
            begin(now.incarnation + 1)

        begin(1)
        return held

    # -- measuring

    async def endure(self, fault: Fault, porcupine: Path) -> Effect:
        """See what ``fault`` does; everybody must recover from it."""
        self._leave_behind()
        before = [one.registrar.held for one in self.pods]
        rounds_before = await self._round()
        worlds_before = self.agents.worlds() if self.agents else 0
        history = History()
        health = Health(self.cluster.metrics_urls)
        numbers = Numbers(self.store, self.keys)
        seen = [Seen(one.client.mirror, numbers.prefix) for one in self.pods]
        swaps = [Swaps(one.client.store, f"{self.keys.prefix}swap/{one.name}") for one in self.pods]
        self._drill = Drill(numbers, seen, swaps)
        # Keys of its own: a history begins with nothing.
        load = HistoryLoad(history, Random(), every_s=0.03, prefix=f"/{next(_loads)}")
        done = asyncio.Event()
        run = self.keys.in_generation(1).run(SHARED_RUN)
        async with store_order(self.store, run) as order, asyncio.TaskGroup() as tasks:
            work = [numbers.run(), self._witness_members(), *(one.run() for one in swaps)]
            if self.job is not None:
                work.append(health.run())
            busy = [tasks.create_task(one) for one in work]
            loaded = {
                one.name: tasks.create_task(load.run([one.port], clients=1, done=done.is_set))
                for one in self.pods
            }
            await self.settled()
            self.measure_from_now()
            await fault(self)
            self.tell("the fault is over")
            await self.settled()
            since_s = self._since_s
            store_gap_s = gap_s(health.served_at_s, since_s) if self.job is not None else 0.0
            watch_gap_s = max(gap_s(one.at_s, since_s) for one in seen)
            write_outage_s = max(gap_s(one.done_at_s, since_s) for one in swaps)
            done.set()
            for name in self.fenced:
                # Its sidecar is parked for good: what its client has asked for waits for ever.
                loaded.pop(name).cancel()
            async with asyncio.timeout(UNTIL_S):
                await asyncio.gather(*loaded.values())
            busy[0].cancel()
            await eventually(lambda: not any(one.lost(numbers.count) for one in seen), 60)
            for task in busy:
                task.cancel()
        again = [one.registrar.held for one in self.pods]
        wrong = await self._wrong(history, order, porcupine)
        if self.agents is not None and (await self._round()).frozen != rounds_before.frozen:
            self.tell("another round has been formed")
        return Effect(
            store_gap_s=store_gap_s,
            watch_gap_s=watch_gap_s,
            write_outage_s=write_outage_s,
            events=numbers.count,
            lost=sum(one.lost(numbers.count) for one in seen),
            doubled=sum(one.doubled() for one in seen),
            out_of_order=sum(one.out_of_order() for one in seen),
            registered_again=sum(one != other for one, other in zip(before, again, strict=True)),
            worlds=(self.agents.worlds() if self.agents else 0) - worlds_before,
            operations=len(history.records) + len(self.members.records),
            wrong=tuple(wrong),
        )

    def story(self, why: str) -> str:
        """The timeline of what happened, and where everybody stands."""
        now = [
            f"{one.name}: incarnation {one.registrar.held and one.registrar.held.incarnation},"
            f" registered: {one.registrar.registered.is_set()}, at {one.client.mirror.revision}"
            for one in self.pods
        ]
        return "\n".join([why, *self.told, *now])

    async def _witness_members(self) -> None:
        """Read the membership again and again, past every line."""
        reader = self.members.client()
        while True:
            record = self.members.begin(Record(reader, "members", "all"))
            try:
                read = await self.store.range(self.keys.prefix, prefix=True, timeout_s=1.0)
            except StoreError:
                self.members.records.remove(record)
            else:
                members = snapshot_of(self.keys, read).members.values()
                there = sorted(f"{one.name}.{one.incarnation}" for one in members)
                self.members.end(record, " ".join(there))
            await asyncio.sleep(0.3)

    async def _round(self) -> Round:
        key = self.keys.in_generation(1).run(RUN_ID).round
        for kv in (await self.store.range(key, timeout_s=60)).kvs:
            return Round.from_kv(kv)
        return Round()

    def _leave_behind(self) -> None:
        """Begin the history of the members again with those who are held, and are to be again.

        With all that the faults before this one have ended, the search for an order of it would
        take ten times as long with every other fault.
        """
        records = self.members.records
        held = [(r.key, r.value) for r in records if r.op == "lapse" and r.return_ns is None]
        self.members.records = [
            r
            for r in records
            if r.op != "members"
            and (r.return_ns is None or (r.op == "join" and (r.key, r.value) in held))
        ]

    def _membership(self) -> History:
        """The history of the membership, with the registrations whose answer was lost for good."""
        history = History()
        pending = [r for r in self.members.records if r.op == "join" and r.return_ns is None]
        history.records = [r for r in self.members.records if r not in pending]
        known = {f"{r.key}.{r.value}" for r in history.records if r.op == "join"}
        read = {word for r in history.records for word in (r.output or "").split()}
        for number, word in enumerate(sorted(read - known)):
            name, _, incarnation = word.rpartition(".")
            for op in ("join", "lapse"):
                lost = Record(1000 + number, op, name, incarnation)
                lost.call_ns = self.members.records[0].call_ns
                history.records.append(lost)
        return history

    async def _wrong(self, history: History, order: StoreOrder, porcupine: Path) -> list[str]:
        """What may never be: sentences."""
        wrong = []
        right, said = await verdict(porcupine, history, "ordered", CHECK_S)
        if not right:
            wrong.append(f"what clients saw: {said}")
        back = order.first_backward_step(history)
        if back is not None:
            wrong.append(back)
        right, said = await verdict(porcupine, self._membership(), "membership", CHECK_S)
        if not right:
            wrong.append(f"the membership: {said}")
        if self.agents is not None:
            wrong += self.agents.faults()
        return wrong


@asynccontextmanager
async def fault_rig(
    cluster: EtcdCluster, driver: str, access: Access, lease_ttl_s: float
) -> AsyncIterator[FaultRig]:
    """A job of three registered sidecars; ``agents`` is for the caller to set."""
    keys = JobKeys("faults", f"job-{next(_jobs)}")
    async with AsyncExitStack() as stack:
        store = EtcdStore(access)
        stack.push_async_callback(store.close)
        rig = FaultRig(cluster, access, keys, store, lease_ttl_s)
        scheme = "https://" if access.tls else ""
        for number in range(SIDECARS):
            links = [
                await stack.enter_async_context(Link(target, Random())) for target in access.targets
            ]
            lines = replace(access, endpoints=tuple(f"{scheme}{one.endpoint}" for one in links))
            client = DRIVERS[driver](lines, first=number)
            stack.push_async_callback(client.close)
            name = f"w-{number}"
            rig.links.append(links)
            rig.pods.append(
                await stack.enter_async_context(
                    pod(client, keys, name, lease_ttl_s, on_held=rig.joining(name))
                )
            )
        yield rig
