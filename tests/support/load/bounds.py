# SPDX-License-Identifier: Apache-2.0
"""What a long-lived job does to its store, done fast: pods come and go, rounds form, leases live.

Real registrars, endpoints and sweepers on any store; of torchrun, what a rendezvous sees of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from math import inf
from random import Random
from time import monotonic

from agent.parts import MemberParts, endpoint_of, member_parts
from agent.surroundings import MemberSettings, Sockets, Surroundings
from launcher_shim.c10d.state_codec import SENTINEL, Flavour, NodeDesc, TorchState, decode, encode
from launcher_shim.tcpstore import wire
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.members.registration import Identity
from rdzv.records.policy import JobPolicy
from rdzv.store import Store
from tests.support.sidecars.raw_client import RawClient, connected
from tests.support.tasks import beside

KEYS = JobKeys("team", "digits")
LEASE_TTL_S = 60.0
"""Longer than this machine may stand still: no pod is lost that was not meant to be."""
PATIENCE_S = 60.0
"""For a step of a pod or of a round, however busy the machine is."""
LEAST, MOST = 2, 16
RUN = "digits"
STATE_KEY = b"/torch.rendezvous." + RUN.encode()
NOW = datetime(2026, 1, 1, tzinfo=UTC)
AWARE = Flavour(aware=True)
LOOK_S = 0.01
SETTLE_S = 120.0
SWEEP_PAUSE_S = 0.1
COMPACTION_S, COMPACT_S = 1.0, 60.0
"""etcd answers before it has compacted: it mostly has after the former, and must by the latter."""
ALIVE_AT_ONCE = 8
LOST_EACH = 4
"""Every fourth pod says no goodbye."""


@dataclass(frozen=True)
class Sample:
    """The store at one moment; ``done`` counts changes, rounds or renewals."""

    done: int
    keys: int
    value_bytes: int
    revision: int
    on_disk: int
    in_use: int


def surroundings(store: Store, seed: str) -> Surroundings:
    """What the parts of a pod stand on."""
    return Surroundings(store=store, clock=monotonic, boot_clock=monotonic, random=Random(seed))


def settings_of(name: str) -> MemberSettings:
    """What a pod is told."""
    return MemberSettings(
        keys=KEYS,
        identity=Identity(name, f"uid-{name}", "10.0.0.1", "", "worker", 1, JobPolicy(LEAST, MOST)),
        lease_ttl_s=LEASE_TTL_S,
        last_call_s=0.0,
        sweep_pause_s=SWEEP_PAUSE_S,
    )


@dataclass
class Job:
    """A job, looked at by one client."""

    client: JobClient
    samples: list[Sample] = field(default_factory=list)

    @property
    def store(self) -> Store:
        """The store that the job is in."""
        return self.client.store

    def member(self, name: str) -> MemberParts:
        """Make the parts of a pod; all pods share one mirror."""
        return member_parts(surroundings(self.store, name), settings_of(name), self.client)

    async def sample(self, done: int) -> Sample:
        """Measure the store now, for the curve."""
        sample = await self.measure(done)
        self.samples.append(sample)
        return sample

    async def settled_sample(self, done: int, at_most: float) -> None:
        """Measure the store for the curve once it has ``at_most`` keys, or when time is up."""
        deadline_s = monotonic() + SETTLE_S
        while (await self.sample(done)).keys > at_most and monotonic() < deadline_s:
            self.samples.pop()
            await asyncio.sleep(LOOK_S)

    async def measure(self, done: int) -> Sample:
        """Measure the store now."""
        read = await self.store.range("/", prefix=True)
        status = await self.store.status()
        return Sample(
            done,
            len(read.kvs),
            sum(len(kv.value) for kv in read.kvs),
            status.revision,
            status.db_size_bytes,
            status.db_size_in_use_bytes,
        )

    async def compacted(self, done: int, at_most: int) -> Sample:
        """Compact everything; measure once ``at_most`` bytes are in use, or when time is up."""
        now = await self.store.range(KEYS.prefix)
        await self.store.compact(now.revision)
        deadline_s = monotonic() + COMPACT_S
        while True:
            await asyncio.sleep(COMPACTION_S)
            sample = await self.measure(done)
            if sample.in_use <= at_most or monotonic() > deadline_s:
                return sample


@asynccontextmanager
async def job_on(store: Store) -> AsyncIterator[Job]:
    """A job without members on ``store``."""
    async with JobClient.of(store, KEYS, clock=monotonic).following() as client:
        yield Job(client)


@asynccontextmanager
async def member_of(job: Job, name: str) -> AsyncIterator[MemberParts]:
    """A member that stays, reports losses and sweeps; at the end it leaves."""
    member = job.member(name)
    parts = (member.registrar, member.losses, member.sweeper)
    async with beside(*(part.run() for part in parts)):
        async with asyncio.timeout(PATIENCE_S):
            await member.registrar.registered.wait()
        yield member
        await member.registrar.leave(PATIENCE_S)


async def change_membership(job: Job, changes: int, samples: int, settled_keys: int) -> None:
    """Let pods with ever-new names come and go: each is two changes.

    Then wait until what the last ones left is swept, for a while: the last sample tells.
    """
    pods = iter(range(changes // 2))
    late = count(changes // 2)
    each = changes // 2 // samples

    async def come_and_go() -> None:
        for number in pods:
            await _one_pod(job, number)
            if (number + 1) % each == 0:
                await job.sample(2 * (number + 1))

    async with member_of(job, "stays"):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(ALIVE_AT_ONCE):
                tasks.create_task(come_and_go())
        deadline_s = monotonic() + SETTLE_S
        while (await job.sample(changes)).keys > settled_keys and monotonic() < deadline_s:
            job.samples.pop()
            # A sweep that met somebody's write waits for the next change.
            await _one_pod(job, next(late))
            await asyncio.sleep(2 * SWEEP_PAUSE_S)


async def _one_pod(job: Job, number: int) -> None:
    registrar = job.member(f"train-7d9f-{number:05}").registrar
    async with beside(registrar.run()), asyncio.timeout(PATIENCE_S):
        await registrar.registered.wait()
    lease_id = registrar.lease_id
    assert lease_id is not None
    if number % LOST_EACH:
        await registrar.leave(PATIENCE_S)
    else:
        await job.store.lease_revoke(lease_id)


async def renew(job: Job, renewals: int, samples: int) -> None:
    """Renew leases, many at a time."""
    ids = range(1, 33)
    for lease_id in ids:
        await job.store.lease_grant(lease_id, round(LEASE_TTL_S))
    each = renewals // samples // len(ids)
    for round_ in range(renewals // len(ids)):
        await asyncio.gather(*(job.store.lease_keep_alive(lease_id) for lease_id in ids))
        if (round_ + 1) % each == 0:
            await job.sample((round_ + 1) * len(ids))
    for lease_id in ids:
        await job.store.lease_revoke(lease_id)


# -- rounds


@asynccontextmanager
async def pod_on(store: Store, name: str) -> AsyncIterator[int]:
    """A sidecar's parts that serve a torchrun; gives the port."""
    async with job_on(store) as job, member_of(job, name) as member:
        around = surroundings(store, f"endpoint {name}")
        endpoint = endpoint_of(around, settings_of(name), member, Sockets(c10d_port=0))
        async with beside(endpoint.run()):
            async with asyncio.timeout(PATIENCE_S):
                await endpoint.listening.wait()
            assert endpoint.port is not None
            yield endpoint.port


class Torchrun:
    """One connection that joins round after round, and stores what torch stores for each."""

    def __init__(self, client: RawClient, me: NodeDesc) -> None:
        self._client = client
        self._me = me
        self._state = TorchState()
        self._token = b""

    async def form(self) -> int:
        """Leave the round, and take part in the next; returns its number."""
        former = self._state.round if self._state.complete else -1
        await self._ask(wire.CompareSet(STATE_KEY, b"", SENTINEL))
        while self._me in self._state.participants:
            rest = {k: v for k, v in self._state.participants.items() if k != self._me}
            await self._set(replace(self._state, participants=rest))
        while True:
            state, me = self._state, self._me
            if me in state.participants and state.complete and state.round > former:
                return state.round
            if state.complete and me not in state.wait_list:
                await self._set(replace(state, wait_list=state.wait_list | {me}))
            elif not state.complete and me not in state.participants:
                with_me = {**state.participants, me: 0}
                await self._set(
                    replace(state, participants=with_me, wait_list=state.wait_list - {me})
                )
            else:
                await asyncio.sleep(LOOK_S)
                await self._ask(wire.Get(STATE_KEY))

    async def store_ranks(self, number: int) -> None:
        """What agents store for a round, in names and in sizes."""
        prefix, rank = STATE_KEY + b".%d/" % number, self._state.participants[self._me]
        role = b'{"role": "default", "rank": %d, "local_world_size": 8}' % rank
        if rank == 0:
            await self._client.ask(wire.Set(prefix + b"MASTER_ADDR", b"10.244.1.17"))
            await self._client.ask(wire.Set(prefix + b"MASTER_PORT", b"43211"))
        for name in (b"role_info", b"assigned_ranks"):
            await self._client.ask(wire.Set(prefix + b"torchelastic/%s/%d" % (name, rank), role))
        await self._client.ask(wire.Add(prefix + b"torchelastic/members", 1))

    async def _set(self, state: TorchState) -> None:
        beats = {**state.last_heartbeats, self._me: NOW}
        desired = encode(replace(state, last_heartbeats=beats), AWARE)
        await self._ask(wire.CompareSet(STATE_KEY, self._token or SENTINEL, desired))

    async def _ask(self, request: wire.Request) -> None:
        blob = await self._client.ask(request)
        assert isinstance(blob, bytes)
        if blob != SENTINEL:
            self._state, self._token = decode(blob)[0], blob


async def form_rounds(
    job: Job,
    connect: Callable[[], Store],
    rounds: int,
    samples: int,
    per_connection: int,
    growth_keys: int,
) -> None:
    """Let two torchruns form rounds; each is another process every ``per_connection`` rounds.

    Each sample from the third on waits, for a while, until there are no more than ``growth_keys``
    more than in the second: what past rounds have left is dropped after the fact.
    """
    each = rounds // samples
    stores = [connect(), connect()]
    try:
        async with pod_on(stores[0], "first") as one, pod_on(stores[1], "second") as two:
            formed = 0
            while formed < rounds:
                async with connected(one) as first, connected(two) as second:
                    pair = [
                        Torchrun(client, NodeDesc(f"10.0.0.{at}", formed + 1, 0))
                        for at, client in enumerate((first, second))
                    ]
                    for _ in range(per_connection):
                        formed += 1
                        await _round(pair)
                        if formed % each == 0:
                            base = job.samples[1].keys if len(job.samples) > 1 else inf
                            await job.settled_sample(formed, base + growth_keys)
    finally:
        for store in stores:
            await store.close()


async def _round(pair: list[Torchrun]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        numbers = await asyncio.gather(*(torchrun.form() for torchrun in pair))
        await asyncio.gather(
            *(one.store_ranks(number) for one, number in zip(pair, numbers, strict=True))
        )
