# SPDX-License-Identifier: Apache-2.0
"""The contract of every store driver: leases."""

from __future__ import annotations

import pytest

from rdzv.errors import LeaseLost
from rdzv.store import Delete, Put, Store
from tests.support.store.backend import Backend, following

TTL_S = 12
"""Six times as long as the test waits between two renewals, for a machine that stands still."""


async def test_a_lease_lives_on_its_renewals_and_takes_its_keys_along(
    store: Store, backend: Backend
) -> None:
    p, lease = backend.prefix, next(backend.lease_ids)
    await store.lease_grant(lease, TTL_S)
    written = await store.txn(
        [], [Put(p + "b", b"", lease), Put(p + "a", b"", lease), Put(p + "c", b"")]
    )
    async with following(store, p, written.revision + 1) as follower:
        # Beyond the time to live; the watch's signs of life are the clock.
        for beat in range(1, 9):
            await follower.until(lambda beat=beat: len(follower.batches) >= beat)  # type: ignore[misc]
            assert await store.lease_keep_alive(lease) >= TTL_S
        assert follower.events == []
        await follower.count(2, deadline_s=60)
    assert follower.seen() == [("delete", p + "a", b""), ("delete", p + "b", b"")]
    (revision,) = {event.kv.mod_revision for event in follower.events}
    assert revision == written.revision + 1
    assert {event.kv.create_revision for event in follower.events} == {0}
    left = await store.range(p, prefix=True)
    assert [kv.key for kv in left.kvs] == [p + "c"]
    with pytest.raises(LeaseLost):
        await store.lease_keep_alive(lease)
    with pytest.raises(LeaseLost):
        await store.txn([], [Put(p + "a", b"", lease)])


async def test_a_revoked_lease_deletes_its_keys_as_one_revision(
    store: Store, backend: Backend
) -> None:
    p, lease = backend.prefix, next(backend.lease_ids)
    await store.lease_grant(lease, 60)
    written = await store.txn([], [Put(p + "b", b"", lease), Put(p + "a", b"", lease)])
    await store.lease_revoke(lease)
    found = await store.range(p, prefix=True)
    assert found.kvs == ()
    assert found.revision == written.revision + 1
    async with following(store, p, written.revision + 1) as follower:
        await follower.count(2)
    assert follower.seen() == [("delete", p + "a", b""), ("delete", p + "b", b"")]
    with pytest.raises(LeaseLost):
        await store.lease_keep_alive(lease)


async def test_grant_and_revoke_may_be_repeated(store: Store, backend: Backend) -> None:
    lease = next(backend.lease_ids)
    await store.lease_grant(lease, 60)
    await store.lease_grant(lease, 60)
    assert await store.lease_keep_alive(lease) == 60
    await store.lease_revoke(lease)
    await store.lease_revoke(lease)


async def test_a_lease_that_never_was_is_lost(store: Store, backend: Backend) -> None:
    with pytest.raises(LeaseLost):
        await store.lease_keep_alive(next(backend.lease_ids))


@pytest.mark.parametrize("lease", [0, -1])
async def test_a_lease_id_is_the_callers_to_choose(store: Store, lease: int) -> None:
    with pytest.raises(ValueError, match="lease id"):
        await store.lease_grant(lease, 10)


async def test_a_key_hangs_on_the_lease_of_its_last_put(store: Store, backend: Backend) -> None:
    p = backend.prefix
    first, second = next(backend.lease_ids), next(backend.lease_ids)
    await store.lease_grant(first, 60)
    await store.lease_grant(second, 60)
    names = ("moved", "freed", "deleted", "kept")
    await store.txn([], [Put(p + name, b"", first) for name in names])
    await store.txn([], [Put(p + "moved", b"", second)])
    await store.txn([], [Put(p + "freed", b"")])
    await store.txn([], [Delete(p + "deleted")])
    await store.txn([], [Put(p + "deleted", b"")])
    kvs = (await store.range(p, prefix=True)).kvs
    assert {kv.key.removeprefix(p): kv.lease for kv in kvs} == {
        "moved": second,
        "freed": 0,
        "deleted": 0,
        "kept": first,
    }
    await store.lease_revoke(first)
    kvs = (await store.range(p, prefix=True)).kvs
    assert [kv.key.removeprefix(p) for kv in kvs] == ["deleted", "freed", "moved"]
    await store.lease_revoke(second)
    kvs = (await store.range(p, prefix=True)).kvs
    assert [kv.key.removeprefix(p) for kv in kvs] == ["deleted", "freed"]
