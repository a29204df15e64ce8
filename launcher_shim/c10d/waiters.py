# SPDX-License-Identifier: Apache-2.0
"""Clients that wait for keys of a run to be created or updated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Waiter:
    """``done`` when every key in ``missing`` has been created or updated."""

    missing: set[bytes]
    done: asyncio.Future[None]


class Waiters:
    """Who waits for which key."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @contextmanager
    def waiting(self, keys: set[bytes]) -> Iterator[asyncio.Future[None]]:
        """Wait for all of ``keys``; leaving the block gives up."""
        waiter = Waiter(keys, asyncio.get_running_loop().create_future())
        for key in keys:
            self._by_key.setdefault(key, []).append(waiter)
        try:
            yield waiter.done
        finally:
            for key in waiter.missing:
                self._by_key[key].remove(waiter)
                if not self._by_key[key]:
                    del self._by_key[key]

    def present(self, key: bytes) -> None:
        """Note that ``key`` was created or updated."""
        for waiter in self._by_key.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing and not waiter.done.done():
                waiter.done.set_result(None)
