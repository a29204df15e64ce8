# SPDX-License-Identifier: Apache-2.0
"""The writes of the round key: each decision once, by compare; losers see the winner's result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

from launcher_shim.c10d.rounds.inputs import RunSnapshot
from launcher_shim.c10d.rounds.records import Round
from rdzv.diary import Diary
from rdzv.errors import RecordError, StoreError
from rdzv.keys import RunKeys
from rdzv.members.guard import Registered
from rdzv.store import Compare, GuardedWrites, KeyValue, Put, Range, Store

log = logging.getLogger(__name__)

PAUSE_S = (0.2, 0.5)


class RoundKey:
    """The round key of one run, written while its sidecar is registered.

    ``drains``: prefix of the drains of the run's generation.
    """

    def __init__(
        self,
        keys: RunKeys,
        drains: str,
        store: Store,
        registered: Registered,
        random: Random,
    ) -> None:
        self._keys = keys
        self._drains = drains
        self._store = store
        self._registered = registered
        self._random = random
        self._diary = Diary(log)

    def decision(self, wanted: Round, stored: RunSnapshot) -> GuardedWrites:
        """Build the write of ``wanted``, if nothing that it depends on changed since ``stored``."""
        return [
            self._is(stored.round),
            # One compare for all nodes: one for each would pass etcd's limit of 128.
            Compare(self._keys.nodes, "mod", "<", stored.revision + 1, prefix=True),
            # A member whose drain has begun meanwhile must not be frozen.
            Compare(self._drains, "mod", "<", stored.revision + 1, prefix=True),
        ], [Put(self._keys.round, wanted.to_json())]

    async def edit(self, current: Round, edit: Callable[[Round], Round | None]) -> int | None:
        """Write ``edit`` of the round; return the revision, or None if there was nothing to change.

        Retries for as long as the store is away and the caller waits.
        """
        while (wanted := edit(current)) is not None:
            try:
                result = await self._store.txn(
                    [self._is(current), self._registered.holds()],
                    [Put(self._keys.round, wanted.to_json())],
                    [Range(self._keys.round)],
                )
            except StoreError as error:
                self._diary.say(f"cannot write the round, retrying: {error}")
                await self._pause()
                continue
            if result.succeeded:
                self._diary.say(f"round {wanted.number} is {stage(wanted)} in the store")
                return result.revision
            read = _parse(result.responses[0])
            if read is None or read.mod_revision == current.mod_revision:
                # The registration guard does not hold; retry until the member is registered again.
                await self._pause()
            current = read or current
        return None

    def _is(self, current: Round) -> Compare:
        return Compare(self._keys.round, "mod", "=", current.mod_revision)

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(*PAUSE_S))


def stage(current: Round) -> str:
    """Return how far a round is, for the log."""
    if current.closed:
        return f"closed by {current.closed}"
    if current.finishing:
        return "finishing"
    if current.ends:
        return "to form again"
    return "complete" if current.complete else "open"


def _parse(kvs: tuple[KeyValue, ...] | int | None) -> Round | None:
    if not isinstance(kvs, tuple) or not kvs:
        return None
    try:
        return Round.from_kv(kvs[0])
    except RecordError as error:
        log.warning("ignoring an unreadable round record: %s", error)
        return None
