# SPDX-License-Identifier: Apache-2.0
"""Who leads real members of etcd."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rdzv.errors import StoreError
from rdzv.store import StoreStatus
from rdzv.store.access import Access
from rdzv.store.etcd.client import EtcdStore

AGREE_S = 60.0
"""For all members to name one leader: on a busy machine they elect again and again."""


async def leader_of(access: Access) -> int:
    """Wait until every member names the same leader."""
    stores = [EtcdStore(replace(access, endpoints=(end,))) for end in access.endpoints]
    try:
        async with asyncio.timeout(AGREE_S):
            while True:
                found = await asyncio.gather(*map(_status, stores))
                leaders = {status.leader_id if status else 0 for status in found}
                for number, status in enumerate(found):
                    if status and leaders == {status.member_id}:
                        return number
                await asyncio.sleep(0.1)
    finally:
        for store in stores:
            await store.close()


async def _status(store: EtcdStore) -> StoreStatus | None:
    """What a member says, or None where it does not answer."""
    try:
        return await store.status()
    except StoreError:
        return None
