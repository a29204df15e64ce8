# SPDX-License-Identifier: Apache-2.0
"""Faults that a simulation injects into a ``MemoryStore``."""

from __future__ import annotations


class Faults:
    """Hooks around everything a ``MemoryStore`` does; these let all pass.

    ``call`` is the method's name. A hook that waits beyond the call's deadline ends it as the real
    driver would: ``StoreUnavailable`` before a write or at a read, ``StoreAmbiguous`` after.
    """

    async def before(self, call: str) -> None:
        """Run before the store acts; raise ``StoreUnavailable`` to refuse the call."""

    async def after(self, call: str) -> None:
        """Run when the store has acted; raise ``StoreAmbiguous`` to lose the answer."""

    async def delivering(self) -> None:
        """Run before a watch takes its next batch; wait here to hold the batch back."""
