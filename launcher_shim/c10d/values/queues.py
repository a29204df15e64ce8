# SPDX-License-Identifier: Apache-2.0
"""Queues of the launchers: each element is a key of its own, in the order of their revisions."""

from __future__ import annotations

from launcher_shim.c10d.values.cells import Cells
from launcher_shim.c10d.values.ledger import Stamp
from launcher_shim.c10d.values.limits import check_size
from launcher_shim.c10d.values.transactions import CellPlan, Recalled, Transactions
from rdzv.keys import RunKeys
from rdzv.store import Compare, Delete, KeyValue, Put, TxnResult


class Queues:
    """The queues of one run."""

    def __init__(self, cells: Cells, transactions: Transactions) -> None:
        self._keys = cells.keys
        self._cells = cells
        self._transactions = transactions

    async def push(self, key: bytes, value: bytes, stamp: Stamp) -> None:
        """Append an element to a queue."""
        check_size(key, value)
        element = self._keys.element(key, f"{stamp.author}.{stamp.number}")

        def learn(result: TxnResult) -> None:
            kv = KeyValue(element, value, result.revision, result.revision, 1, 0)
            self._cells.learn([kv])

        plan = CellPlan((), (Put(element, value),), learn)
        await self._transactions.once(stamp, None, lambda: plan, lambda note, _: Recalled(None))

    async def pop(self, key: bytes, stamp: Stamp) -> tuple[int, bytes]:
        """Take the oldest element; return the length before, and the element (empty if none)."""

        def plan() -> CellPlan[tuple[int, bytes]]:
            elements = self._cells.cell(key).queue()
            if not elements:
                return CellPlan((queue_empty(self._keys, key),), (), lambda result: (0, b""))
            name, oldest = elements[0]
            value, length = oldest.value or b"", len(elements)
            element = self._keys.element(key, name)

            def taken(result: TxnResult) -> tuple[int, bytes]:
                self._cells.learn_absent(element, result.revision)
                return length, value

            return CellPlan(
                (Compare(element, "mod", "=", oldest.mod_revision),),
                (Delete(element),),
                taken,
                b"%d %s" % (length, value),
            )

        def recall(note: bytes, revision: int) -> Recalled[tuple[int, bytes]]:
            length, _, value = note.partition(b" ")
            return Recalled((int(length), value))

        await self._transactions.read([key])
        return await self._transactions.once(stamp, key, plan, recall)

    async def length(self, key: bytes) -> int:
        """Count a queue's elements, linearizably."""
        return len((await self._transactions.read([key]))[key].queue())


def queue_empty(keys: RunKeys, key: bytes) -> Compare:
    """Return the compare that holds while a queue is empty: pushes themselves compare nothing."""
    return Compare(keys.queue(key), "create", "=", 0, prefix=True)
