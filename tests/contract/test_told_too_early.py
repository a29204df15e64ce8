# SPDX-License-Identifier: Apache-2.0
"""Writes by what is not true any more: of a watch that was told of progress ahead of its events, as
etcd 3.5.7 may tell it, or of a registration that another sidecar has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest

from launcher_shim.c10d.rounds.decision_loop import RoundKey
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy
from launcher_shim.c10d.rounds.own_node import OwnNode
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from rdzv.drain.decision import decide
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy, LiveRound
from rdzv.drain.transactions import transaction
from rdzv.job import JobClient, Registered
from rdzv.keys import JobKeys
from rdzv.reconcile import Kernel
from rdzv.records.drain import Drain
from rdzv.records.job import Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import listing_of
from rdzv.store import KeyValue, Put, WatchEvent
from rdzv.store.memory.client import MemoryStore

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
RUN = HERE.run("digits")
LEASE = 7
A, B = (Node(name, "asking", f"of-{name}", 1, "10.0.0.1", 7, 0) for name in "ab")
WORLD = Round(complete=True, frozen=(A.seat, B.seat))
LEFT = Put(RUN.node("b"), replace(B, state="left", left_reason="closed").to_json())
DRAIN = Put(HERE.drain("uid-b"), Drain("uid-b", "b", "spot", "hand").to_json())
NOW_S = 1000.0


@dataclass
class Sidecar:
    """What ``a`` knows of the store; its watch is told by hand."""

    store: MemoryStore

    def __post_init__(self) -> None:
        client = JobClient.of(self.store, KEYS, clock=lambda: NOW_S)
        self.mirror, self.membership = client.mirror, client.membership
        registered = Registered(HERE.member("a"), lambda: LEASE, self.again)
        self.rendezvous = Rendezvous(
            Kernel(client, registered.fence, self.again, client.mirror.clock, Random(1)),
            registered,
            member="a",
            drains=HERE.drains,
            keys=RUN,
            run_id="digits",
            launched=RoundPolicy(2, 4),
            policy=lambda: RoundPolicy(2, 4),
            membership=lambda current: RoundMembers(frozenset("ab")),
        )
        self._round_key = RoundKey(RUN, HERE.drains, self.store, registered, Random(1))

    async def read(self) -> None:
        read = await self.store.range(KEYS.prefix, prefix=True)
        self.mirror.replace(read.kvs, read.revision)

    async def freeze(self) -> Round:
        """Write the world by what is known; return what the store holds then."""
        word = self.rendezvous.snapshot()
        world = replace(WORLD, mod_revision=word.round.mod_revision)
        await self.store.txn(*self._round_key.decision(world, word))
        kvs = (await self.store.range(RUN.round)).kvs
        return Round.from_kv(kvs[0]) if kvs else Round()

    @staticmethod
    async def again() -> bool:
        return True


@pytest.fixture
async def sidecar() -> Sidecar:
    store = MemoryStore()
    await store.lease_grant(LEASE, 60)
    members = [
        Member(name, f"uid-{name}", at, "10.0.0.1", "host", "worker", 1, 1, 3)
        for at, name in enumerate("ab", 1)
    ]
    await store.txn(
        [],
        [
            Put(KEYS.job, Job(JobPolicy(1, 3)).to_json()),
            *(Put(HERE.member(one.name), one.to_json(), LEASE) for one in members),
            *(Put(RUN.node(node.member), node.to_json(), LEASE) for node in (A, B)),
        ],
    )
    one = Sidecar(store)
    await one.read()
    return one


@pytest.mark.parametrize("change", [LEFT, DRAIN], ids=["left", "drains"])
async def test_i2_nobody_is_frozen_by_a_watch_that_was_told_of_what_it_was_not_shown(
    sidecar: Sidecar, change: Put
) -> None:
    result = await sidecar.store.txn([], [change])
    sidecar.mirror.apply((), result.revision)
    assert not (await sidecar.freeze()).complete
    await sidecar.read()
    assert (await sidecar.freeze()).complete


async def test_i6_the_node_of_a_stale_incarnation_is_not_written(sidecar: Sidecar) -> None:
    store, held = sidecar.store, Registered(HERE.member("a"), lambda: LEASE, sidecar.again)
    own = OwnNode(
        key=RUN.node("a"), round_key=RUN.round, store=store, registered=held, random=Random(1)
    )
    # Another sidecar has the name, and the lease of this one has not ended.
    await store.lease_grant(LEASE + 1, 60)
    await store.txn([], [Put(HERE.member("a"), b"{}", LEASE + 1)])
    own.aim(replace(A, ask=2))
    for _ in range(3):
        await own.step()
    (kv,) = (await store.range(RUN.node("a"))).kvs
    assert Node.from_kv(kv).ask == A.ask


def shows_alien(sidecar: Sidecar, revision: int) -> None:
    alien = KeyValue(RUN.nodes + "not/ours", b"", revision, revision, 1, 0)
    sidecar.mirror.apply((WatchEvent("put", alien),), revision)


def tells(sidecar: Sidecar, revision: int) -> None:
    sidecar.mirror.apply((), revision)


@pytest.mark.parametrize(
    ("key", "follow"), [("/another/job", tells), (RUN.nodes + "not/ours", shows_alien)]
)
async def test_what_is_no_news_of_the_job_stops_no_world(
    sidecar: Sidecar, key: str, follow: Callable[[Sidecar, int], None]
) -> None:
    """Neither what happens to others in the store, nor a key that is left out here."""
    result = await sidecar.store.txn([], [Put(key, b"")])
    follow(sidecar, result.revision)
    assert (await sidecar.freeze()).complete


async def test_no_decision_about_drains_overlooks_one_that_was_only_told_of(
    sidecar: Sidecar,
) -> None:
    own = Drain("uid-a", "a", "spot", "hand", seconds_left=60.0)
    await sidecar.store.txn([], [Put(HERE.drain("uid-a"), own.to_json())])
    await sidecar.store.txn([], [Put(RUN.round, WORLD.to_json())])
    await sidecar.read()
    result = await sidecar.store.txn([], [DRAIN])
    sidecar.mirror.apply((), result.revision)
    known = sidecar.rendezvous.snapshot().round
    live = LiveRound("digits", 0, True, ("a", "b"), master="m", mod_revision=known.mod_revision)
    now = sidecar.membership.snapshot()
    snapshot = DrainingSnapshot(
        now, listing_of(now), live, {}, "uid-a", revision=sidecar.mirror.certain_revision
    )
    decision = decide(NOW_S, snapshot, DrainObservations(0, "idle", NOW_S, NOW_S), DrainPolicy())
    assert decision.commit is not None, decision.reason
    assert not (await sidecar.store.txn(*transaction(KEYS, snapshot, decision))).succeeded
