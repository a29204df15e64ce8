# SPDX-License-Identifier: Apache-2.0
"""Lets the first launchers start together, once every first node is ready or has ended."""

from __future__ import annotations

import asyncio


class StartGate:
    """Opens when every ticket has been used or given up."""

    def __init__(self, tickets: int) -> None:
        self._missing = tickets
        self._opened = asyncio.Event()

    def ticket(self) -> Ticket:
        """One of the tickets that the gate waits for."""
        return Ticket(self)

    def count_one(self) -> None:
        """One fewer to wait for."""
        self._missing -= 1
        if self._missing <= 0:
            self._opened.set()

    async def opened(self) -> None:
        """Wait for the last one."""
        await self._opened.wait()


class Ticket:
    """Counts once, however often it is used and given up."""

    def __init__(self, gate: StartGate) -> None:
        self._gate = gate
        self._counted = False

    async def pass_through(self) -> None:
        """Be there, and wait for the others."""
        self.give_up()
        await self._gate.opened()

    def give_up(self) -> None:
        """Let nobody wait for this one any longer."""
        if not self._counted:
            self._counted = True
            self._gate.count_one()
