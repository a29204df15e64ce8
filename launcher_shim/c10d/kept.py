# SPDX-License-Identifier: Apache-2.0
"""Files for the sidecar that comes after this one: the container's stage, and masters of worlds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.stages import Stages, container_of
from launcher_shim.rundir import layout
from rdzv.errors import RecordError
from rdzv.reconcile import Loop, Outlook
from rdzv.records.codec import dump_record, load_record, take

log = logging.getLogger(__name__)

T = TypeVar("T")

WORLDS_MAX = 16
"""The number of newest worlds whose masters are kept. More than one: a restored store may show an
older world first."""


class Kept(Protocol):
    """A store of files that live as long as the pod."""

    def content(self, name: str) -> bytes | None:
        """Read a file, or return None if there is none; may block, and raises ``OSError``."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Write a whole file; may block, and raises ``OSError``."""
        ...


class KeptFile:
    """One such file. ``files``: None if no sidecar will come after this one."""

    def __init__(self, files: Kept | None, name: str) -> None:
        self._files = files
        self._name = name
        self._writing = asyncio.Lock()

    async def read(self, decode: Callable[[bytes], T], otherwise: str) -> T | None:
        """Load what the sidecar before has kept; if it is unreadable, log ``otherwise``."""
        if self._files is None:
            return None
        try:
            content = await asyncio.to_thread(self._files.content, self._name)
            return None if content is None else decode(content)
        except (OSError, RecordError) as error:
            log.warning("%s is unreadable (%s): %s", self._name, error, otherwise)
            return None

    async def write(self, content: Callable[[], bytes], otherwise: str) -> bool:
        """Write the file; return whether that succeeded. If it did not, log ``otherwise``."""
        if self._files is None:
            return True
        try:
            async with self._writing:  # one after another: the newest must be written last
                await asyncio.to_thread(self._files.put, self._name, content())
        except OSError as error:
            why = error.strerror
            log.warning("%s cannot be written (%s): %s", self._name, why, otherwise)
            return False
        return True


class KeptStages:
    """The present ``stages``, and their file."""

    def __init__(self, files: Kept | None) -> None:
        self.stages = Stages()
        self._file = KeptFile(files, layout.STAGES)

    async def read(self) -> None:
        """Load what the sidecar before has kept."""
        kept = await self._file.read(Stages.from_json, "counting stages from the first again")
        self.stages = kept or self.stages

    async def pass_over(self, nonce: str, name: str) -> bool:
        """Record that a container is through with ``name``; return whether that is on disk.

        If the next sidecar did not know it, the container's next torchrun would be passed over
        instead. It is taken back if the client goes before it has the answer: its torchrun then
        starts, in ``name``.
        """
        before = self.stages
        after = self.stages = replace(before, finished=dict(before.finished))
        after.finish(container_of(nonce), name)
        after.passed_by = nonce
        try:
            # Shielded: the next write has to wait for this one even if this task is cancelled.
            kept = await asyncio.shield(asyncio.ensure_future(self.keep()))
        except asyncio.CancelledError:
            self._take_back(after, before)
            await self.keep()
            raise
        if not kept:
            self._take_back(after, before)
        return kept

    def _take_back(self, after: Stages, before: Stages) -> None:
        if self.stages is after:
            self.stages = before

    async def keep(self) -> bool:
        """Write the stages to disk; return whether that succeeded."""
        return await self._file.write(
            lambda: self.stages.to_json(),
            "were this sidecar started again, the next torchrun would be taken for one of the first"
            " stage",
        )


class KeptMasters(Loop):
    """The master's address of each of the newest worlds, by which its ranks know it.

    A store that was restored to before a world no longer has that address, and no rank stores it
    again. Without it no rank would be known to be of this world: those that wait at a boundary
    would do so until the world is over, and when a pod goes none would save. A world is a round's
    number and its seats: a restored store may use the number again for others.
    """

    def __init__(self, files: Kept | None) -> None:
        super().__init__()
        self._file = KeptFile(files, layout.MASTERS)
        self._masters: dict[str, str] = {}
        """Masters by world, the one noted last at the end."""
        self._noted = False

    async def read(self) -> None:
        """Load what the sidecar before has kept."""
        otherwise = "in a store that has lost this world, its ranks will not be asked to save"
        self._masters = await self._file.read(_masters, otherwise) or {}

    async def step(self) -> Outlook:
        """Write the masters to disk if one has been noted."""
        if self._noted:
            self._noted = False
            await self.keep()
        return Outlook()

    async def keep(self) -> None:
        """Write the masters to disk."""
        await self._file.write(
            lambda: dump_record({"masters": self._masters}),
            "were the store restored to before this world and this sidecar started again, its ranks"
            " would not be asked to save",
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
        self._noted = True
        self.wake()

    def of(self, run: str, round: Round) -> str:
        """Return the master of exactly this world; empty if it is not known."""
        return self._masters.get(_world(run, round), "")


def _masters(content: bytes) -> dict[str, str]:
    kept = take(layout.MASTERS, load_record(layout.MASTERS, content), "masters", dict)
    return {world: take(layout.MASTERS, kept, world, str) for world in kept}


def _world(run: str, round: Round) -> str:
    """Name a world in a few bytes, however many seats it has."""
    seats = "".join(f"{tuple(seat)}\n" for seat in round.frozen)
    return hashlib.sha256(f"{run}\n{round.number}\n{seats}".encode()).hexdigest()[:32]
