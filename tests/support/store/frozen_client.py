# SPDX-License-Identifier: Apache-2.0
"""A client with a lease of 15 s and a watch; the test stops the whole process for longer."""

from __future__ import annotations

import asyncio
import sys

from rdzv.errors import LeaseLost, StoreError
from rdzv.store import Put, WatchEvent
from rdzv.store.etcd.client import EtcdStore
from tests.support.store.patient_store import PatientEtcdStore

LEASE = 0xF0F0
TTL_S = 15


async def renew(store: EtcdStore) -> None:
    while True:
        try:
            await store.lease_keep_alive(LEASE)
        except LeaseLost:
            print("lease lost", flush=True)  # noqa: T201
            return
        except StoreError:
            continue
        await asyncio.sleep(0.3)


async def follow(store: EtcdStore, start: int) -> list[WatchEvent]:
    events: list[WatchEvent] = []
    async for batch in store.watch("/frozen/", start):
        events += batch.events
        if len(events) >= 20:
            break
    return events


async def main() -> None:
    first = PatientEtcdStore(sys.argv[1:])
    await first.lease_grant(LEASE, TTL_S)
    start = (await first.txn([], [Put("/frozen-lease", b"", LEASE)])).revision + 1
    await first.close()
    store = EtcdStore(sys.argv[1:])
    following = asyncio.create_task(follow(store, start))
    renewing = asyncio.create_task(renew(store))
    await asyncio.sleep(1)
    print("ready", flush=True)  # noqa: T201
    await renewing
    events = await following
    revisions = [event.kv.mod_revision for event in events]
    in_order = revisions == sorted(set(revisions))
    print(f"{len(events)} events {'in order' if in_order else 'in disorder'}", flush=True)  # noqa: T201
    await store.close()


asyncio.run(main())
