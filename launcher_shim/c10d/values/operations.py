# SPDX-License-Identifier: Apache-2.0
"""Every operation of a c10d client on a key that is not the rendezvous state.

A cached hit answers at once, also while the store is away; a miss needs a linearizable read.
Writes wait for the store: torch's client has no timeout for them and takes a closed connection
for the end of the job. Each is linearizable, and applied once whatever becomes of its answer
(``launcher_shim.c10d.values.transactions``).
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher_shim.c10d.values.cell import Floor
from launcher_shim.c10d.values.cells import Cells
from launcher_shim.c10d.values.reads import Answers, Reads, Waiters
from launcher_shim.c10d.values.transactions import Transactions, left_behind
from launcher_shim.c10d.values.writes import Counters, Queues, Writes
from rdzv.keys import RunKeys
from rdzv.members.guard import Registered
from rdzv.mirror import Mirror
from rdzv.store import Delete, Store, WatchEvent


class Kv:
    """The launchers' keys of one run."""

    def __init__(self, keys: RunKeys, mirror: Mirror, store: Store, registered: Registered) -> None:
        self.keys = keys
        self._mirror = mirror
        self._store = store
        self._waiters = Waiters()
        self._seen_revision = mirror.revision
        self._relists = mirror.relists
        self.answers = Answers()
        self._floor = Floor(mirror, self.answers.forget)
        self.cells = Cells(keys, self._waiters.present, self._waiters.pushed, self.answers.forget)
        self.cells.learn(mirror.under(keys.prefix))
        self._transactions = Transactions(store, registered, self.cells, self._floor)
        self.reads = Reads(
            self.cells, self._floor, mirror, self._transactions, self._waiters, self.answers
        )
        self.writes = Writes(self.cells, self._transactions)
        self.counters = Counters(store, self.cells, self._floor, self._transactions, self._waiters)
        self.queues = Queues(self.cells, self._transactions)
        self._unsubscribe = mirror.subscribe(self._apply)

    def close(self) -> None:
        """End all operations with ``LeaseLost``, also those under way: the generation is over."""
        self._transactions.end()
        self._waiters.end()
        self.answers.end()
        self._unsubscribe()

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        revision = self._mirror.revision
        if revision < self._seen_revision:
            # The store was restored or emptied.
            self._floor.begin_anew()
            self.cells.begin_anew()
            self.cells.learn(self._mirror.under(self.keys.prefix))
        self._seen_revision = revision
        in_order = self._relists == self._mirror.relists
        self._relists = self._mirror.relists
        self.cells.apply(events, revision, in_order=in_order)

    async def forget(self, key_prefix: bytes) -> None:
        """Delete everything under ``key_prefix``: torch never deletes the keys of an old round."""
        await self._transactions.drop(
            [
                Delete(self.keys.value(key_prefix), prefix=True),
                Delete(self.keys.addends(key_prefix).removesuffix("/"), prefix=True),
                Delete(self.keys.queue(key_prefix).removesuffix("/"), prefix=True),
            ]
        )

    async def forget_others(self, root: bytes, present: bytes) -> None:
        """Delete all folders of values under ``root``, which ends with a slash, but ``present``."""
        under = [key for key in self.cells.existing() if key.startswith(root)]
        folders = {key[: key.find(b"/", len(root)) + 1] for key in under} - {b"", present}
        for folder in sorted(folders):
            await self.forget(folder)

    async def forget_author(self, author: str) -> None:
        """Delete the ledger entries of a closed connection."""
        await self._transactions.drop(self._transactions.ledger.forget(author))

    def left_behind(self, member: str) -> list[str]:
        """Return ledger entries of connections that ended with a former sidecar of ``member``.

        Call it before a client of this sidecar is served.
        """
        return left_behind(member, [kv.key for kv in self._mirror.under(self.keys.operations)])

    async def forget_records(self, left: Sequence[str]) -> None:
        """Delete keys of the store that are no longer needed, as ``left_behind`` returns them."""
        await self._transactions.drop([Delete(key) for key in left])
