# SPDX-License-Identifier: Apache-2.0
"""Clients that wait for keys of a run to be created or updated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rdzv.errors import LeaseLost, WireError


def _always() -> bool:
    return True


@dataclass(eq=False, slots=True)
class Waiter:
    """``done`` when every key in ``missing`` has been created or updated, to what ``suits``.

    Where ``suits`` cannot tell, ``done`` ends with what it raises.
    """

    missing: set[bytes]
    done: asyncio.Future[None]
    suits: Callable[[], bool] = _always

    def suited(self) -> bool:
        """Whether what has just come counts."""
        try:
            return self.suits()
        except WireError as error:
            if not self.done.done():
                self.done.set_exception(error)
            return False

    def see(self, key: bytes) -> bool:
        """Note that ``key`` has come; return whether that ends the wait."""
        self.missing.discard(key)
        ends = not self.missing and not self.done.done()
        if ends:
            self.done.set_result(None)
        return ends


class Waiters:
    """Who waits for which key."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Waiter]] = {}
        self._over = False

    def __len__(self) -> int:
        return len(self._by_key)

    def end(self) -> None:
        """Nothing is created or updated here any more: who waits is let go, with ``LeaseLost``."""
        self._over = True
        for waiters in self._by_key.values():
            for waiter in waiters:
                if not waiter.done.done():
                    waiter.done.set_result(None)

    @contextmanager
    def waiting(self, keys: set[bytes], *, suits: Callable[[], bool] = _always) -> Iterator[Waiter]:
        """Wait for all of ``keys``; leaving the block gives up.

        ``suits`` is asked as each value comes, and one that does not suit does not count.
        ``keys`` shrinks to those that are still missing. Raises ``LeaseLost`` at the end of the
        block if ``end`` was called before they were there.
        """
        waiter = Waiter(keys, asyncio.get_running_loop().create_future(), suits)
        if self._over:
            waiter.done.set_result(None)
        for key in keys:
            self._by_key.setdefault(key, []).append(waiter)
        try:
            yield waiter
        finally:
            for key in waiter.missing:
                self._remove(waiter, key)
        if self._over and waiter.missing:
            raise LeaseLost("the generation of these keys is over")

    def present(self, key: bytes) -> None:
        """Note that ``key`` was created or updated."""
        for waiter in tuple(self._by_key.get(key, ())):
            if waiter.suited():
                self._remove(waiter, key)
                waiter.see(key)

    def pushed(self, key: bytes) -> None:
        """Note that the queue at ``key`` has one element more: that is for one waiter.

        It is for the one that came first, of those that wait for nothing else any more. Those
        before it have seen the key, too, as at torch's own server.
        """
        waiters = self._by_key.get(key, [])
        while waiters:
            waiter = waiters[0]
            self._remove(waiter, key)
            if waiter.see(key):
                break

    def shown(self, waiter: Waiter, key: bytes) -> None:
        """Note that ``waiter`` has itself found ``key``."""
        if key in waiter.missing:
            self._remove(waiter, key)
            waiter.see(key)

    def _remove(self, waiter: Waiter, key: bytes) -> None:
        self._by_key[key].remove(waiter)
        if not self._by_key[key]:
            del self._by_key[key]
