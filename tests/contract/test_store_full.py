# SPDX-License-Identifier: Apache-2.0
"""A store without space: its answer leaves open what became of a write, and so does ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from rdzv.errors import StoreAmbiguous, StoreFull
from rdzv.store import Put
from rdzv.store.etcd.client import EtcdStore
from tests.support.store.backend import DRIVERS
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import PATIENT

pytestmark = pytest.mark.etcd

QUOTA_BYTES = 8 << 20
FILLED_WITHIN_S = 60.0


@pytest.fixture
def small() -> Iterator[EtcdCluster]:
    with EtcdCluster(1, arguments=[f"--quota-backend-bytes={QUOTA_BYTES}"]) as member:
        yield member


@pytest.mark.parametrize("driver", DRIVERS.values())
async def test_a_write_that_finds_no_space_may_have_been_applied(
    small: EtcdCluster, driver: type[EtcdStore]
) -> None:
    store = PATIENT[driver](small.endpoints)
    value = bytes(1 << 20)
    # How many go in is the disk's affair: etcd counts the size of its file, which it writes behind.
    async with asyncio.timeout(FILLED_WITHIN_S):
        for number in count():
            try:
                await store.txn([], [Put(f"/{number}", value)], timeout_s=10)
            except StoreAmbiguous:
                continue  # a disk that is slow
            except StoreFull:
                break
    # It may be there or not, both have been seen under these words: the one that takes the last
    # room is applied. Whatever comes after it is not.
    with pytest.raises(StoreFull, match="space"):
        await store.txn([], [Put("/next", value)])
    assert (await store.range("/next")).kvs == ()
    await store.close()
