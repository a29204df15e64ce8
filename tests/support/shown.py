# SPDX-License-Identifier: Apache-2.0
"""Objects of the cluster as a test shows them, in the place of a ``Collection``."""

from __future__ import annotations

import asyncio
from typing import Any


class Shown:
    """Objects by UID, which stay as they are until the test shows others."""

    def __init__(self, **items: Any) -> None:
        self.sequence = 1
        self.items = items
        self._changed = asyncio.Condition()

    async def show(self, **items: Any) -> None:
        """Show these objects instead."""
        async with self._changed:
            self.items = items
            self.sequence += 1
            self._changed.notify_all()

    async def changed_after(self, sequence: int) -> None:
        """Wait until ``self.sequence`` is above ``sequence``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.sequence > sequence)
