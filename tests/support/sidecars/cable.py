# SPDX-License-Identifier: Apache-2.0
"""The cable between one sidecar and the store: it is cut, or holds a transaction back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from rdzv.store import Operation, Put, TxnResult
from rdzv.store.memory.client import MemoryEngine
from tests.support.store.cut import Cut
from tests.support.store.transacting import Carry, TransactingStore, Transaction

Moment = Literal["sending", "answering"]


class Cable(Cut):
    """Between one sidecar and the store: can be cut, and can hold transactions back."""

    def __init__(self) -> None:
        super().__init__()
        self._jammed: str | None = None
        self._freed = asyncio.Event()
        self.on_txn: Callable[[Moment, Sequence[Operation]], None] = lambda moment, operations: None

    def jam(self, prefix: str) -> None:
        """Hold every transaction that puts a key under ``prefix``, until the cable is mended."""
        self._jammed = prefix
        self._freed.clear()

    def mend(self) -> None:
        """Let through again whatever was cut or jammed."""
        super().mend()
        self._jammed = None
        self._freed.set()

    async def passing(self, moment: Moment, operations: Sequence[Operation]) -> None:
        self.on_txn(moment, operations)
        keys = [operation.key for operation in operations if isinstance(operation, Put)]
        jammed = self._jammed
        if moment == "sending" and jammed is not None and any(k.startswith(jammed) for k in keys):
            await self._freed.wait()


class CabledStore(TransactingStore):
    """One sidecar's client of the store."""

    def __init__(self, engine: MemoryEngine, cable: Cable) -> None:
        super().__init__(engine, faults=cable)
        self.cable = cable

    async def transact(self, asked: Transaction, carry: Carry) -> TxnResult:
        await self.cable.passing("sending", asked.then)
        result = await carry(asked)
        await self.cable.passing("answering", asked.then)
        return result
