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
    """One client's wait for several keys."""

    missing: set[bytes]
    """Keys that have not come yet."""
    done: asyncio.Future[None]
    """Set once every key has come; gets the error that ``suits`` raises."""
    suits: Callable[[], bool] = _always
    """Returns whether the present values are what the client waits for."""

    def suited(self) -> bool:
        """Return whether the value that has just come counts; an error ends the wait."""
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
    """The waits of one run, by key."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Waiter]] = {}
        self._over = False

    def __len__(self) -> int:
        return len(self._by_key)

    def end(self) -> None:
        """Wake every waiter with ``LeaseLost``, and refuse new ones: the generation is over."""
        self._over = True
        for waiters in self._by_key.values():
            for waiter in waiters:
                if not waiter.done.done():
                    waiter.done.set_result(None)

    @contextmanager
    def waiting(self, keys: set[bytes], *, suits: Callable[[], bool] = _always) -> Iterator[Waiter]:
        """Wait for all of ``keys`` within the block; leaving it gives up.

        ``suits`` is called as each value comes; if it returns False, the value does not count.
        ``keys`` shrinks to those still missing. Raises ``LeaseLost`` at the end of the block if
        ``end`` was called before all had come.
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
        """Note that the queue at ``key`` has one more element, which ends one wait.

        It ends the first wait that lacks nothing else. The waits before that have seen the key
        too, as at torch's own server.
        """
        waiters = self._by_key.get(key, [])
        while waiters:
            waiter = waiters[0]
            self._remove(waiter, key)
            if waiter.see(key):
                break

    def shown(self, waiter: Waiter, key: bytes) -> None:
        """Note that a read for ``waiter`` has shown ``key``."""
        if key in waiter.missing:
            self._remove(waiter, key)
            waiter.see(key)

    def _remove(self, waiter: Waiter, key: bytes) -> None:
        self._by_key[key].remove(waiter)
        if not self._by_key[key]:
            del self._by_key[key]
