# SPDX-License-Identifier: Apache-2.0
"""An etcd that is over its quota, so that it takes no writes (NOSPACE), and its cure."""

from __future__ import annotations

import json

from rdzv.errors import StoreAmbiguous, StoreFull, StoreUnavailable
from rdzv.store import Put, Store
from tests.support.store.etcd_cluster import EtcdCluster

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


def cure(cluster: EtcdCluster) -> None:
    """Do as an operator would: delete, compact, defragment, disarm."""
    deleted = json.loads(cluster.etcdctl("del", FILLER, "--prefix", "-w", "json"))
    cluster.etcdctl("compact", str(deleted["header"]["revision"]))
    cluster.etcdctl("defrag")
    cluster.etcdctl("alarm", "disarm")
