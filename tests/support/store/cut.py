# SPDX-License-Identifier: Apache-2.0
"""A cable between one client and a ``MemoryStore``."""

from __future__ import annotations

import asyncio

from rdzv.errors import StoreUnavailable
from rdzv.store.memory.client import Faults


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
