# SPDX-License-Identifier: Apache-2.0
"""What a client left on record goes when it ends, though the store does not answer at first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from launcher_shim.tcpstore import wire
from rdzv.errors import StoreAmbiguous, StoreError, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.store import Compare, Delete, TxnResult
from rdzv.store.memory.client import MemoryEngine
from tests.support.histories.pods import pod
from tests.support.sidecars.raw_client import connected
from tests.support.store.transacting import Carry, TransactingStore, Transaction
from tests.support.waiting import DEADLINE_S

KEYS = JobKeys("team", "digits")


class Failing(TransactingStore):
    """Fails the first attempts to drop records: by ``error``, or as under another lease."""

    def __init__(self, engine: MemoryEngine, error: StoreError | None) -> None:
        super().__init__(engine)
        self._error = error
        self._times = 2
        self.dropped = asyncio.Event()

    async def transact(self, asked: Transaction, carry: Carry) -> TxnResult:
        drops = any(isinstance(one, Delete) and "/ops/" in one.key for one in asked.then)
        if drops and self._times:
            self._times -= 1
            if self._error is not None:
                raise self._error
            never = Compare(KEYS.job, "mod", "=", 1 << 40)
            asked = replace(asked, compares=[*asked.compares, never])
        result = await carry(asked)
        if drops and result.succeeded:
            self.dropped.set()
        return result


@pytest.mark.parametrize(
    "error",
    [StoreUnavailable("planted"), StoreAmbiguous("planted"), None],
    ids=["not applied", "not known", "another lease"],
)
async def test_what_a_client_left_on_record_goes_once_the_store_answers(
    error: StoreError | None,
) -> None:
    store = Failing(MemoryEngine(), error)
    async with pod(store, KEYS, "w-0", 10.0) as one, asyncio.timeout(DEADLINE_S):
        async with connected(one.port) as client:
            assert await client.ask(wire.Add(b"/n", 1)) == 1
        await store.dropped.wait()
        found = await store.range(KEYS.prefix, prefix=True)
        assert not [kv.key for kv in found.kvs if "/ops/" in kv.key]
