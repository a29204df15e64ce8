# SPDX-License-Identifier: Apache-2.0
"""What the user of one job may do in a real etcd, and what of another job it may not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from random import Random

import pytest

from rdzv.errors import LeaseLost, StoreRefused
from rdzv.keys import ROOT, JobKeys
from rdzv.store import Compare, Delete, Put, Range, Store
from rdzv.store.etcd.admin import JobRole
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import PatientRights
from tests.support.store.secure import cannot_touch, job_access, opened, root_access, secure_cluster

__all__ = ["secure_cluster"]

pytestmark = pytest.mark.etcd

MINE = JobKeys("team", "train")
OTHERS = (
    JobKeys("team", "train-2"),
    JobKeys("team", "train2"),
    JobKeys("team", "trai"),
    JobKeys("team-2", "train"),
    JobKeys("tea", "m"),
)
"""Jobs whose names begin alike, in this namespace and in others."""

LEASE = 77


@pytest.fixture
async def mine(secure_cluster: EtcdCluster) -> AsyncIterator[Store]:
    async with opened(await job_access(secure_cluster, MINE), patiently=True) as store:
        yield store


@pytest.fixture
async def root(secure_cluster: EtcdCluster) -> AsyncIterator[Store]:
    """Everybody has written something, one of them on a lease."""
    access = await asyncio.to_thread(root_access, secure_cluster)
    async with opened(access, patiently=True) as store:
        await store.txn([], [Put(keys.job, b"theirs") for keys in OTHERS])
        await store.lease_grant(LEASE, 60)
        await store.txn([], [Put(OTHERS[0].last_commit, b"leased", LEASE)])
        yield store


async def test_a_job_may_do_all_it_needs_under_its_own_prefix(mine: Store) -> None:
    lease_id = Random().getrandbits(62) + 1
    await mine.lease_grant(lease_id, 60)
    key = MINE.in_generation(1).member("node-0")
    done = await mine.txn(
        [Compare(key, "create", "=", 0), Compare(MINE.prefix, "lease", "=", 0, prefix=True)],
        [Put(key, b"1", lease_id), Range(MINE.prefix, prefix=True)],
        [Delete(MINE.in_generation(1).prefix, prefix=True)],
    )
    assert done.succeeded
    assert await mine.lease_keep_alive(lease_id) > 0
    async with aclosing(mine.watch(MINE.prefix, done.revision)) as batches:
        batch = await anext(batches)
    assert [event.kv.key for event in batch.events] == [key]
    await mine.lease_revoke(lease_id)
    assert (await mine.range(MINE.prefix, prefix=True)).kvs == ()
    assert (await mine.status()).version


@pytest.mark.parametrize("keys", OTHERS, ids=lambda keys: keys.prefix)
async def test_a_job_can_neither_read_nor_write_another(
    mine: Store, root: Store, keys: JobKeys
) -> None:
    before = await root.range(keys.prefix, prefix=True)
    await cannot_touch(mine, keys, MINE)
    assert (await root.range(keys.prefix, prefix=True)).kvs == before.kvs


async def test_another_jobs_lease_is_neither_ended_nor_renewed_nor_used(
    mine: Store, root: Store
) -> None:
    for touch in (
        mine.lease_revoke(LEASE),
        mine.lease_keep_alive(LEASE),
        mine.txn([], [Put(MINE.job, b"1", LEASE)]),
    ):
        with pytest.raises(StoreRefused, match="permission denied"):
            await touch
    assert await root.lease_keep_alive(LEASE) > 0
    assert (await root.range(OTHERS[0].last_commit)).kvs[0].lease == LEASE


async def test_the_history_is_not_a_jobs_to_forget(mine: Store, root: Store) -> None:
    revision = (await root.range(ROOT)).revision
    with pytest.raises(StoreRefused, match="permission denied"):
        await mine.compact(revision)


async def test_a_lease_without_keys_is_anybodys(mine: Store, root: Store) -> None:
    """What etcd does not keep apart, and the page on security tells."""
    await root.lease_grant(LEASE + 1, 60)
    await mine.lease_revoke(LEASE + 1)
    with pytest.raises(LeaseLost):
        await root.lease_keep_alive(LEASE + 1)


async def test_who_may_have_a_password_is_not_taken_for_one_without(
    secure_cluster: EtcdCluster, etcd_cluster: EtcdCluster
) -> None:
    """Where nobody needs a password the store does not tell who has one."""
    role, certified = JobRole(MINE), JobRole(MINE, "certified")
    job = await job_access(secure_cluster, MINE)
    rights = PatientRights(await asyncio.to_thread(root_access, secure_cluster))
    asks_nobody = PatientRights(etcd_cluster.access())
    try:
        refused = "is there already, perhaps with a password: etcdctl user delete "
        with pytest.raises(StoreRefused, match=f"{role.user_name} {refused}{role.user_name}"):
            await rights.make(role, None)
        async with opened(job, patiently=True) as store:
            await store.range(MINE.job)
        await rights.make(certified, None)
        await rights.make(certified, None)
        await asks_nobody.make(certified, None)
        with pytest.raises(StoreRefused, match=refused):
            await asks_nobody.make(certified, None)
    finally:
        await rights.close()
        await asks_nobody.close()
