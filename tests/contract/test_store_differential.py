# SPDX-License-Identifier: Apache-2.0
"""The memory store and real etcd, given the same transactions, answer the same."""

from __future__ import annotations

import random

import pytest

from rdzv.errors import LeaseLost, StoreError
from rdzv.store import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    Range,
    Store,
    TxnResult,
    WatchEvent,
)
from rdzv.store.memory.client import MemoryStore
from tests.support.store.backend import following
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import PatientEtcdStore

pytestmark = pytest.mark.etcd

TRANSACTIONS = 150
LEASES = 3


class Script:
    """Random transactions under one prefix; the same seed gives the same ones."""

    def __init__(self, seed: int, prefix: str) -> None:
        self._random = random.Random(seed)
        self._prefix = prefix
        self.first_lease = (seed + 1) << 48

    def key(self) -> str:
        return self._prefix + self._random.choice(["a", "a/", "a/1", "a/2", "a0", "b", "é", "%"])

    def lease(self) -> int:
        if self._random.random() < 0.6:
            return 0
        # The last one is never granted.
        return self.first_lease + self._random.randrange(LEASES + 1)

    def operation(self) -> Operation:
        match self._random.randrange(4):
            case 0 | 1:
                return Put(self.key(), self._random.randbytes(2), self.lease())
            case 2:
                return Delete(self.key(), prefix=self._random.random() < 0.4)
            case _:
                return Range(self.key(), prefix=self._random.random() < 0.5)

    def compare(self, base: int) -> Compare:
        target = self._random.choice(["create", "mod", "version", "lease", "value"])
        operands: dict[str, int | bytes] = {
            "create": base + self._random.randrange(40),
            "mod": base + self._random.randrange(40),
            "version": self._random.randrange(4),
            "lease": self.lease(),
            "value": self._random.randbytes(1),
        }
        operand = operands[target]
        if target in ("create", "mod") and self._random.random() < 0.4:
            operand = 0
        op = self._random.choice(["=", "!=", "<", ">"])
        return Compare(
            self.key(),
            target,  # type: ignore[arg-type]
            op,  # type: ignore[arg-type]
            operand,
            prefix=self._random.random() < 0.4,
        )

    def operations(self) -> list[Operation]:
        return [self.operation() for _ in range(self._random.randrange(4))]

    def transaction(self, base: int) -> tuple[list[Compare], list[Operation], list[Operation]]:
        compares = [self.compare(base) for _ in range(self._random.randrange(3))]
        return compares, self.operations(), self.operations()


def rebased(kv: KeyValue, base: int) -> KeyValue:
    create = kv.create_revision and kv.create_revision - base
    return kv._replace(create_revision=create, mod_revision=kv.mod_revision - base)


def answer(result: TxnResult, base: int) -> object:
    responses = [
        tuple(rebased(kv, base) for kv in response) if isinstance(response, tuple) else response
        for response in result.responses
    ]
    return result.succeeded, result.revision - base, responses


async def play(
    store: Store, seed: int, prefix: str
) -> tuple[list[object], list[WatchEvent], list[KeyValue]]:
    script = Script(seed, prefix)
    for number in range(LEASES):
        await store.lease_grant(script.first_lease + number, 600)
    base = (await store.range(prefix)).revision
    answers: list[object] = []
    for number in range(TRANSACTIONS):
        try:
            answers.append(answer(await store.txn(*script.transaction(base)), base))
        except StoreError as error:
            answers.append(type(error))
        if number == TRANSACTIONS // 2:
            await store.lease_revoke(script.first_lease)
    for number in range(LEASES):
        await store.lease_revoke(script.first_lease + number)
    found = await store.range(prefix, prefix=True)
    async with following(store, prefix, base + 1) as follower:
        await follower.until(
            lambda: bool(follower.batches) and follower.batches[-1].revision >= found.revision
        )
    events = [WatchEvent(event.kind, rebased(event.kv, base)) for event in follower.events]
    return answers, events, [rebased(kv, base) for kv in found.kvs]


@pytest.mark.parametrize("seed", range(5))
async def test_same_transactions_same_answers(etcd_cluster: EtcdCluster, seed: int) -> None:
    prefix = f"/differential/{seed}/"
    memory = MemoryStore()
    etcd = PatientEtcdStore(etcd_cluster.endpoints)
    expected = await play(etcd, seed, prefix)
    actual = await play(memory, seed, prefix)
    await etcd.close()
    assert LeaseLost in expected[0]
    assert len(expected[1]) > TRANSACTIONS / 3
    assert actual == expected
