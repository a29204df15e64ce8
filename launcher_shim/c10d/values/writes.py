# SPDX-License-Identifier: Apache-2.0
"""Writes of the launchers' values.

Each is linearizable, and applied once even if its answer is lost
(``launcher_shim.c10d.values.ledger``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from launcher_shim.c10d.values.cells import Cells
from launcher_shim.c10d.values.ledger import Stamp
from launcher_shim.c10d.values.limits import batches, check_size
from launcher_shim.c10d.values.queues import queue_empty
from launcher_shim.c10d.values.transactions import CellPlan, Recalled, Transactions
from rdzv.store import Compare, Delete, Operation, Put, TxnResult

T = TypeVar("T")


class Writes:
    """The writes of one run."""

    def __init__(self, cells: Cells, transactions: Transactions) -> None:
        self._keys = cells.keys
        self._cells = cells
        self._transactions = transactions

    async def put(self, items: Sequence[tuple[bytes, bytes]], stamp: Stamp) -> None:
        """Set all ``items``, in as few transactions as etcd's limits allow."""
        items = tuple(dict(items).items())
        for key, value in items:
            check_size(key, value)
        done = -1
        if stamp.again and (note := await self._transactions.noted(stamp)):
            done = int(note)
        for number, batch in enumerate(batches(items)):
            if number > done:
                await self._put(batch, number, stamp)

    async def _put(self, items: Sequence[tuple[bytes, bytes]], batch: int, stamp: Stamp) -> None:
        operations: list[Operation] = []
        for key, value in items:
            operations += [
                Put(self._keys.value(key), value),
                Delete(self._keys.addends(key), prefix=True),
            ]

        def learn(result: TxnResult) -> None:
            for key, value in items:
                self._cells.learn_value(key, value, result.revision)

        plan = CellPlan((), tuple(operations), learn, b"%d" % batch)
        # The entry of an earlier sidecar was read above.
        await self._transactions.once(
            stamp._replace(again=False),
            None,
            lambda: plan,
            lambda note, _: Recalled(None) if int(note) == batch else None,
        )

    async def compare_set(self, key: bytes, expected: bytes, desired: bytes, stamp: Stamp) -> bytes:
        """Compare and set, with the answers of torch's own server, also for a missing key."""
        check_size(key, desired)

        def modify(value: bytes | None) -> tuple[bytes | None, bytes]:
            if value is None:
                return (desired, desired) if not expected else (None, expected)
            return (desired, desired) if value == expected else (None, value)

        return await self._modify(key, modify, stamp, desired)

    async def append(self, key: bytes, value: bytes, stamp: Stamp) -> None:
        """Append to a value; create it if there is none."""

        def modify(old: bytes | None) -> tuple[bytes | None, None]:
            new = (old or b"") + value
            check_size(key, new)
            return new, None

        await self._modify(key, modify, stamp, None)

    async def delete(self, key: bytes, stamp: Stamp) -> bool:
        """Delete a key with its addends and its queue; return whether it existed."""

        def plan() -> CellPlan[bool]:
            cell = self._cells.cell(key)
            if not cell.exists():
                none = (*self._cells.unchanged(key), queue_empty(self._keys, key))
                return CellPlan(none, (), lambda result: False)
            deletes = (
                Delete(self._keys.value(key)),
                Delete(self._keys.addends(key), prefix=True),
                Delete(self._keys.queue(key), prefix=True),
            )

            def gone(result: TxnResult) -> bool:
                self._cells.learn_gone(key, result.revision)
                return True

            there = self._cells.unchanged(key)
            if cell.value() is None:
                name, oldest = cell.queue()[0]
                element = self._keys.element(key, name)
                there = (*there, Compare(element, "mod", "=", oldest.mod_revision))
            return CellPlan(there, deletes, gone)

        return await self._transactions.once(stamp, key, plan, lambda note, _: Recalled(True))

    async def _modify(
        self,
        key: bytes,
        modify: Callable[[bytes | None], tuple[bytes | None, T]],
        stamp: Stamp,
        done: T,
    ) -> T:
        """Change a value. ``modify`` returns the new value (None: leave it) and the answer.

        ``done`` is the answer if an earlier attempt was applied.
        """

        def plan() -> CellPlan[T]:
            cell = self._cells.cell(key)
            new, answer = modify(cell.value())
            if new is None:
                return CellPlan(self._cells.unchanged(key), (), lambda result: answer)
            value = new
            operations: tuple[Operation, ...] = (Put(self._keys.value(key), value),)
            if cell.is_sum():
                operations += (Delete(self._keys.addends(key), prefix=True),)

            def learn(result: TxnResult) -> T:
                self._cells.learn_value(key, value, result.revision)
                return answer

            return CellPlan(self._cells.unchanged(key), operations, learn)

        return await self._transactions.once(stamp, key, plan, lambda note, _: Recalled(done))
