# SPDX-License-Identifier: Apache-2.0
"""The steps that the ranks of this pod make in each world, while it lasts and when they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from launcher_shim.rundir.step_count import StepCount, count_from
from launcher_shim.rundir.step_lines import StepLine
from rdzv.records.quarantine import Stay


class TorchrunLives:
    """The steps in the present world, read from the ranks once their torchrun asks for a place.

    While a torchrun asks, its former ranks have ended and its next have not begun, and the steps
    that ranks have reported stay: so the read for a death may come late. ``steps`` reads these, and
    may block. ``died`` is called with each stay that ended by a death, in their order.
    """

    def __init__(
        self, steps: Callable[[], Sequence[StepLine]], died: Callable[[Stay], None]
    ) -> None:
        self._steps = steps
        self._died = died
        self._turns: asyncio.Queue[Stay | str] = asyncio.Queue()
        self._of: tuple[str, StepCount] | None = None
        self._asked = self._counted = 0

    def came(self, nonce: str) -> None:
        """Note a torchrun that asks for a place."""
        self._asked += 1
        self._turns.put_nowait(nonce)

    def ended(self, stay: Stay) -> None:
        """Note a death; its steps have not been read yet."""
        self._turns.put_nowait(stay)

    async def run(self) -> None:
        """Read the steps for each note, in their order, until cancelled."""
        while True:
            turn = await self._turns.get()
            lines = await asyncio.to_thread(self._steps)
            if isinstance(turn, Stay):
                self._died(replace(turn, steps=self._seen(turn.nonce, lines)))
            else:
                self._of = turn, count_from(lines)
                self._counted += 1

    async def made(self, nonce: str) -> int | None:
        """Read how many steps there are in the present world; None while no rank reports any."""
        lines = await asyncio.to_thread(self._steps)
        return self._seen(nonce, lines) if self._counted == self._asked else None

    def _seen(self, nonce: str, lines: Sequence[StepLine]) -> int | None:
        if self._of is None or self._of[0] != nonce:
            return None
        self._of = nonce, self._of[1].seen(lines)
        return self._of[1].made
