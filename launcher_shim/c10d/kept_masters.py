# SPDX-License-Identifier: Apache-2.0
"""The master's address of each world, by which its ranks know it, kept for the next sidecar.

A store that was restored to before a world no longer has that address, and no rank stores it again.
Without it no rank would be known to be of this world: those that wait at a boundary would do so
until the world is over, and when a pod goes none would save.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

from launcher_shim.c10d.kept_stages import Kept
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.rundir import layout
from rdzv.errors import RecordError
from rdzv.records.codec import dump_record, load_record, take

log = logging.getLogger(__name__)

WORLDS_MAX = 16
"""The number of newest worlds that are kept. More than one: a restored store may show an older
world first."""


class KeptMasters:
    """The masters of the newest worlds. ``files``: None if no sidecar will come after this one.

    A world is a round's number and its seats: a restored store may use the number again for others.
    """

    def __init__(self, files: Kept | None) -> None:
        self._files = files
        self._masters: dict[str, str] = {}
        """Masters by world, the one noted last at the end."""
        self._noted = asyncio.Event()

    async def read(self) -> None:
        """Load what the sidecar before has kept."""
        if self._files is None:
            return
        try:
            content = await asyncio.to_thread(self._files.content, layout.MASTERS)
            if content is not None:
                fields = load_record(layout.MASTERS, content)
                kept = take(layout.MASTERS, fields, "masters", dict)
                self._masters = {world: take(layout.MASTERS, kept, world, str) for world in kept}
        except (OSError, RecordError) as error:
            log.warning(
                "%s is unreadable (%s): in a store that has lost this world, its ranks will not be"
                " asked to save",
                layout.MASTERS,
                error,
            )

    async def run(self) -> None:
        """Write the masters to disk whenever one is noted, until cancelled."""
        while True:
            await self._noted.wait()
            self._noted.clear()
            await self.keep()

    async def keep(self) -> None:
        """Write the masters to disk."""
        if self._files is None:
            return
        try:
            content = dump_record({"masters": self._masters})
            await asyncio.to_thread(self._files.put, layout.MASTERS, content)
        except OSError as error:
            log.warning(
                "%s cannot be written (%s): were the store restored to before this world and this"
                " sidecar started again, its ranks would not be asked to save",
                layout.MASTERS,
                error.strerror,
            )

    def note(self, run: str, round: Round, master: str) -> None:
        """Note the ``master`` by which the ranks of a complete round know it."""
        world = _world(run, round)
        if self._masters.get(world) == master:
            return
        self._masters.pop(world, None)
        self._masters[world] = master
        while len(self._masters) > WORLDS_MAX:
            del self._masters[next(iter(self._masters))]
        self._noted.set()

    def of(self, run: str, round: Round) -> str:
        """Return the master of exactly this world; empty if it is not known."""
        return self._masters.get(_world(run, round), "")


def _world(run: str, round: Round) -> str:
    """Name a world in a few bytes, however many seats it has."""
    seats = "".join(f"{tuple(seat)}\n" for seat in round.frozen)
    return hashlib.sha256(f"{run}\n{round.number}\n{seats}".encode()).hexdigest()[:32]
