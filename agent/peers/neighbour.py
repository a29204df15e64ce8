# SPDX-License-Identifier: Apache-2.0
"""One neighbour of this sidecar: the line to it, and the sign that it is lost, if there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent.peers.line import Dial, IdleLine, PeerAway, PeerMute
from rdzv.pacing import Doubling
from rdzv.peers import Sign
from rdzv.records.job import Member

PAUSE = Doubling(1.0, 30.0)
"""Backoff between two attempts to open the line, in seconds."""

STEADY_S = 5.0
"""Age of a line whose end is no failure: the next one is opened at once."""


class Neighbour:
    """One incarnation of one member.

    ``sign``: the sign of its loss, as long as a line that was open has broken and no other one
    could be opened. ``reached``: whether a line was ever open. ``changed`` is called when one of
    them changes.
    """

    def __init__(
        self, member: Member, dial: Dial, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        self.member = member
        self.sign: Sign | None = None
        self.reached = False
        self.since_s = clock()
        """Time since which it is a neighbour."""
        self.written = False
        """Whether the present loss was written: once it is taken back, it is not written again."""
        self._dial = dial
        self._clock = clock
        self._changed = changed

    async def run(self) -> None:
        """Keep a line open until cancelled."""
        failures = 0
        while True:
            try:
                line = await self._dial(self.member)
            except PeerAway as away:
                failures += 1
                if self.reached:
                    self._note(away.sign)
            except PeerMute:
                failures += 1
                self._note(None)
            else:
                self.reached = True
                self._note(None)
                if await self._outlast(line) >= STEADY_S:
                    failures = 0
                else:
                    failures += 1
            if failures:
                await asyncio.sleep(PAUSE.after(failures - 1))

    async def _outlast(self, line: IdleLine) -> float:
        """Wait until the line ends; return how long it was open, in seconds."""
        opened_s = self._clock()
        try:
            if await line.ended():
                self._note("silent")
        finally:
            line.close()
        return self._clock() - opened_s

    def _note(self, sign: Sign | None) -> None:
        if sign is None:
            self.written = False
        self.sign = sign
        self._changed()
