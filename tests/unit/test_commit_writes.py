# SPDX-License-Identifier: Apache-2.0
"""The transactions of a drain against the store's own semantics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv import listing
from rdzv.drain.decision import cancel, decide, transaction
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy, LiveRound
from rdzv.keys import JobKeys
from rdzv.membership import Membership
from rdzv.mirror import Mirror
from rdzv.records.commit import Vote, vote_transaction
from rdzv.records.drain import Drain
from rdzv.records.job import Job, Member
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
ROUND = HERE.run("run").round
NOW = 1000.0


class Desk:
    """One sidecar's look at the store, renewed when asked for."""

    snapshot: DrainingSnapshot

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def look(self) -> DrainingSnapshot:
        read = await self._store.range(KEYS.prefix, prefix=True)
        mirror = Mirror(KEYS.prefix, clock=lambda: 0.0)
        mirror.replace(read.kvs, read.revision)
        membership = Membership(KEYS, mirror)
        snapshot = membership.snapshot()
        number = next(kv.mod_revision for kv in read.kvs if kv.key == ROUND)
        live = LiveRound("run", 3, True, ("a", "b"), master="m", mod_revision=number)
        self.snapshot = DrainingSnapshot(
            snapshot,
            listing.decide(snapshot),
            live,
            membership.votes(),
            "uid-b",
            revision=mirror.certain_revision,
        )
        return self.snapshot

    async def carry_out(self) -> bool:
        """Write what is due by the last look."""
        seen = DrainObservations(
            self.snapshot.commit.epoch, self.snapshot.commit.phase, NOW, NOW - 2.0
        )
        decision = decide(NOW, self.snapshot, seen, DrainPolicy())
        assert decision.commit or decision.drains, decision.reason
        compares, operations = transaction(KEYS, self.snapshot, decision)
        return (await self._store.txn(compares, operations)).succeeded

    async def vote(self, member: str, vote: Vote) -> bool:
        made = vote_transaction(HERE, member, vote, self.snapshot.commit)
        return (await self._store.txn(*made)).succeeded


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore()
    members = [
        Member(name, f"uid-{name}", at, "10.0.0.1", "host", "worker", 1, 1, 3)
        for at, name in enumerate("abc", 1)
    ]
    await store.txn(
        [],
        [
            Put(KEYS.job, Job(1, 3).to_json()),
            Put(ROUND, b"the round"),
            *(Put(HERE.member(member.name), member.to_json()) for member in members),
        ],
    )
    return store


async def notice(store: MemoryStore, member: str) -> None:
    drain = Drain(f"uid-{member}", member, "spot", "hand")
    await store.txn([], [Put(HERE.drain(drain.pod_uid), drain.to_json())])


async def saved(store: MemoryStore) -> Desk:
    """Bring the drain of ``a`` to where all have acknowledged step 9."""
    desk = Desk(store)
    await notice(store, "a")
    await desk.look()
    assert await desk.carry_out()
    await desk.look()
    for member in "ab":
        assert await desk.vote(member, Vote(1, 3, f"uid-{member}", 9))
    await desk.look()
    assert await desk.carry_out()
    for member, vote in (await desk.look()).votes.items():
        assert await desk.vote(member, replace(vote, acked=9))
    await desk.look()
    return desk


async def test_i7_a_drain_goes_through_all_phases_and_is_granted_with_its_step_on_record(
    store: MemoryStore,
) -> None:
    desk = await saved(store)
    assert await desk.carry_out()
    done = await desk.look()
    assert done.commit.phase == "done"
    assert not done.membership.drains["uid-a"].outcome
    last = done.membership.last_commit
    assert last is not None
    assert (last.step, last.round, last.epoch) == (9, 3, 1)
    assert await desk.carry_out()
    drain = (await desk.look()).membership.drains["uid-a"]
    assert (drain.outcome, drain.step) == ("committed", 9)


async def test_two_sidecars_write_one_decision_once(store: MemoryStore) -> None:
    one = await saved(store)
    other = Desk(store)
    await other.look()
    assert await one.carry_out()
    assert not await other.carry_out()


async def test_nothing_of_a_round_is_finished_after_it(store: MemoryStore) -> None:
    desk = await saved(store)
    await store.txn([], [Put(ROUND, b"the next round")])
    assert not await desk.carry_out()


async def test_i10_a_grant_does_not_miss_a_drain_that_came_since(store: MemoryStore) -> None:
    desk = await saved(store)
    assert await desk.carry_out()
    await desk.look()
    await notice(store, "b")
    assert not await desk.carry_out()


async def test_a_vote_is_created_once_and_not_after_its_hold(store: MemoryStore) -> None:
    desk = Desk(store)
    await notice(store, "a")
    await desk.look()
    assert await desk.carry_out()
    await desk.look()
    assert await desk.vote("a", Vote(1, 3, "uid-a", 9))
    assert not await desk.vote("a", Vote(1, 3, "uid-a", 12))
    made = cancel(KEYS, (await desk.look()).membership, "uid-a")
    assert not isinstance(made, str)
    assert (await store.txn(*made)).succeeded
    assert not await desk.vote("b", Vote(1, 3, "uid-b", 9))


async def test_a_cancel_and_a_grant_exclude_each_other(store: MemoryStore) -> None:
    desk = await saved(store)
    assert await desk.carry_out()
    made = cancel(KEYS, (await desk.look()).membership, "uid-a")
    assert not isinstance(made, str)
    assert await desk.carry_out()
    assert not (await store.txn(*made)).succeeded
    assert isinstance(cancel(KEYS, (await desk.look()).membership, "uid-a"), str)


async def test_the_next_epoch_drops_the_votes_of_the_one_before(store: MemoryStore) -> None:
    desk = await saved(store)
    made = cancel(KEYS, (await desk.look()).membership, "uid-a")
    assert not isinstance(made, str)
    await store.txn(*made)
    await desk.look()
    for phase in ("done", "idle", "hold"):
        if phase == "hold":
            await notice(store, "b")
            await desk.look()
        assert await desk.carry_out()
        assert (await desk.look()).commit.phase == phase
    assert (await store.range(HERE.votes, prefix=True)).kvs == ()
