# SPDX-License-Identifier: Apache-2.0
"""A barrier for the first launchers: it opens once every first node is ready or has ended."""

from __future__ import annotations

import asyncio


class StartGate:
    """A gate that opens once every ticket has been used or given up."""

    def __init__(self, tickets: int) -> None:
        self._missing = tickets
        self._opened = asyncio.Event()

    def ticket(self) -> Ticket:
        """Return one of the tickets that the gate waits for."""
        return Ticket(self)

    def count_one(self) -> None:
        """Count one ticket; the last one opens the gate."""
        self._missing -= 1
        if self._missing <= 0:
            self._opened.set()

    async def opened(self) -> None:
        """Wait until the gate is open."""
        await self._opened.wait()


class Ticket:
    """One ticket of a gate; it counts once, however often it is used or given up."""

    def __init__(self, gate: StartGate) -> None:
        self._gate = gate
        self._counted = False

    async def pass_through(self) -> None:
        """Use the ticket, and wait for the others."""
        self.give_up()
        await self._gate.opened()

    def give_up(self) -> None:
        """Count the ticket, so that nobody waits for it any longer."""
        if not self._counted:
            self._counted = True
            self._gate.count_one()
