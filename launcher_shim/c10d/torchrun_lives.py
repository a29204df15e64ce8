# SPDX-License-Identifier: Apache-2.0
"""The steps that the ranks of each torchrun of this pod have made by the time that it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from launcher_shim.rundir.step_count import StepCount, count_from
from launcher_shim.rundir.step_lines import StepLine
from rdzv.records.quarantine import Death


class TorchrunLives:
    """The steps of each torchrun, read from its ranks when it asks for a place and when it dies.

    No other reads are needed: while a torchrun asks, its former ranks have ended and its next have
    not begun, and the steps that ranks have reported stay. ``steps`` reads these, and may block.
    ``died`` is called with each death, in their order.
    """

    def __init__(
        self, steps: Callable[[], Sequence[StepLine]], died: Callable[[Death], None]
    ) -> None:
        self._steps = steps
        self._died = died
        self._turns: asyncio.Queue[Death | str] = asyncio.Queue()
        self._of: tuple[str, StepCount] | None = None

    def came(self, nonce: str) -> None:
        """Note that a torchrun asks for a place."""
        self._turns.put_nowait(nonce)

    def ended(self, death: Death) -> None:
        """Note a death; its steps have not been read yet."""
        self._turns.put_nowait(death)

    async def run(self) -> None:
        """Read the steps for each note, in their order, until cancelled."""
        while True:
            turn = await self._turns.get()
            nonce = turn.nonce if isinstance(turn, Death) else turn
            if self._of is None or self._of[0] != nonce:
                self._of = nonce, count_from(await asyncio.to_thread(self._steps))
            steps = await self.made(nonce)
            if isinstance(turn, Death):
                self._died(replace(turn, steps=steps))

    async def made(self, nonce: str) -> int | None:
        """Read how many steps the present torchrun has made; None while no rank reports any."""
        lines = await asyncio.to_thread(self._steps)
        if self._of is None or self._of[0] != nonce:
            return None
        self._of = nonce, self._of[1].seen(lines)
        return self._of[1].made
