# SPDX-License-Identifier: Apache-2.0
"""Where a simulation breaks a ``MemoryStore``."""

from __future__ import annotations

import asyncio

from rdzv.errors import StoreUnavailable


class Faults:
    """Hooks around everything a ``MemoryStore`` does; these let all pass.

    ``call`` is the method's name. A hook that waits beyond the call's deadline ends it as the
    real driver would: ``StoreUnavailable`` before a write or at a read, ``StoreAmbiguous`` after.
    """

    async def before(self, call: str) -> None:
        """Run before the store acts; raise ``StoreUnavailable`` to refuse the call."""

    async def after(self, call: str) -> None:
        """Run when the store has acted; raise ``StoreAmbiguous`` to lose the answer."""

    async def delivering(self) -> None:
        """Run before a watch takes its next batch; wait here to hold the batch back."""


class Cut(Faults):
    """A cable between one client and the store that can be cut and mended."""

    def __init__(self) -> None:
        self._whole = asyncio.Event()
        self._whole.set()

    def cut(self) -> None:
        """From now on no call reaches the store, and watches are silent."""
        self._whole.clear()

    def mend(self) -> None:
        """Let calls through again; watches go on where they were."""
        self._whole.set()

    async def before(self, call: str) -> None:
        """Refuse while cut."""
        if not self._whole.is_set():
            raise StoreUnavailable(f"{call}: cut off from the store")

    async def delivering(self) -> None:
        """Wait while cut."""
        await self._whole.wait()
