# SPDX-License-Identifier: Apache-2.0
"""A store in memory of whose transactions a subclass decides how they go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rdzv.store import DEFAULT_TIMEOUT_S, Compare, Operation, TxnResult
from rdzv.store.memory.client import MemoryStore


@dataclass(frozen=True)
class Transaction:
    """What is asked for."""

    compares: Sequence[Compare]
    then: Sequence[Operation]
    otherwise: Sequence[Operation] = ()


Carry = Callable[[Transaction], Awaitable[TxnResult]]


class TransactingStore(MemoryStore):
    """One client; ``transact`` is all that there is to override."""

    async def transact(self, asked: Transaction, carry: Carry) -> TxnResult:
        """Let ``carry`` do what is ``asked``, or something else, before or after something."""
        return await carry(asked)

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TxnResult:
        asking = super().txn

        async def carry(asked: Transaction) -> TxnResult:
            return await asking(asked.compares, asked.then, asked.otherwise, timeout_s=timeout_s)

        return await self.transact(Transaction(compares, then, otherwise), carry)
