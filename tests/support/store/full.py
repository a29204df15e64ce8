# SPDX-License-Identifier: Apache-2.0
"""An etcd that is over its quota, so that it takes no writes (NOSPACE), and its cure."""

from __future__ import annotations

import asyncio
import json

from rdzv.errors import StoreAmbiguous, StoreFull, StoreUnavailable
from rdzv.store import Put, Store
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import PatientEtcdStore

SMALL = ("--quota-backend-bytes=16777216",)
"""Arguments of an etcd that is soon full."""

FILLER = "/filler/"


async def fill(store: Store) -> None:
    """Fill it up."""
    number = 0
    while True:
        try:
            await store.txn([], [Put(f"{FILLER}{number}", bytes(1 << 19))], timeout_s=60)
        except StoreFull:
            return
        except (StoreAmbiguous, StoreUnavailable):
            continue
        number += 1


def fill_at_once(cluster: EtcdCluster) -> None:
    """Fill it up, from a thread without an event loop."""

    async def run() -> None:
        store = PatientEtcdStore(cluster.access())
        try:
            await fill(store)
        finally:
            await store.close()

    asyncio.run(run())


def cure(cluster: EtcdCluster) -> None:
    """Do as an operator would: delete, compact, defragment, disarm."""
    deleted = json.loads(cluster.etcdctl("del", FILLER, "--prefix", "-w", "json"))
    cluster.etcdctl("compact", str(deleted["header"]["revision"]))
    cluster.etcdctl("defrag")
    cluster.etcdctl("alarm", "disarm")
